"""Simulated studies of two arms whose true ratio of mean k3 KL is known.

A step's KL is a level times log-normal noise of mean 1, autocorrelated along the run. In some steps
a spike multiplies it: single tokens that an MoE routes to another expert do that. Seeds differ in
two ways: their noise floor, which both arms of a seed share, and their own ratio of the arms. Steps
and spikes have mean 1, so `Scenario.ratio` is the ratio of the two arms' expected means in the
typical (median) seed.
"""

from dataclasses import dataclass, replace

import numpy as np

Array = np.ndarray

AUTOCORRELATION = 0.3  # of log steps; those of the first records had -0.1 to 0.3
FLOOR_SD = 0.5  # log scale, between seeds with base checkpoints of their own


@dataclass(frozen=True)
class Spikes:
    """How often a step is multiplied by a log-uniform factor between low and high."""

    frequency: float = 0.0
    low: float = 1.0
    high: float = 1.0

    @property
    def mean_factor(self) -> float:
        """Expected factor of a step, 1 where there are no spikes."""
        if self.high == self.low:
            return 1 + self.frequency * (self.low - 1)
        mean = (self.high - self.low) / np.log(self.high / self.low)
        return float(1 + self.frequency * (mean - 1))

    def draw(self, shape: tuple[int, ...], generator: np.random.Generator) -> Array:
        """The factor of every step."""
        sizes = np.exp(generator.uniform(np.log(self.low), np.log(self.high), shape))
        return np.where(generator.random(shape) < self.frequency, sizes, 1.0)


NONE = Spikes()
# the first records: 16 to 68 times a run's median in BF16, up to 359 in QAT, 5 of 60 steps each
AS_RECORDED = Spikes(0.05, 16, 359)


@dataclass(frozen=True)
class Scenario:
    """A population of studies.

    Attributes:
        ratio: expected mean of the arm over that of the control, in the typical seed.
        step_sd: of log steps, apart from spikes.
        seed_sd: of the seeds' own log ratios of the arms.
        arm_spikes, control_spikes: of either arm's steps.
    """

    name: str
    ratio: float
    seeds: int = 5
    steps: int = 20
    step_sd: float = 0.3
    seed_sd: float = 0.2
    arm_spikes: Spikes = NONE
    control_spikes: Spikes = NONE

    def of_size(self, seeds: int, steps: int) -> "Scenario":
        """The same population, another number of seeds and steps."""
        return replace(self, seeds=seeds, steps=steps)

    def draw(self, generator: np.random.Generator) -> tuple[Array, Array]:
        """k3 KL of arm and control in units of the floor, each (seeds, steps)."""
        shape = (self.seeds, self.steps)
        floor_S1 = np.exp(FLOOR_SD * generator.normal(size=(self.seeds, 1)))
        own_S1 = np.exp(self.seed_sd * generator.normal(size=(self.seeds, 1)))
        arm_ST, control_ST = (
            _unit_mean(self.step_sd, _autocorrelated(shape, generator)) for _ in range(2)
        )
        arm_ST = arm_ST * self.arm_spikes.draw(shape, generator) / self.arm_spikes.mean_factor
        control_ST = control_ST * self.control_spikes.draw(shape, generator)
        control_ST = control_ST / self.control_spikes.mean_factor
        return self.ratio * own_S1 * floor_S1 * arm_ST, floor_S1 * control_ST


def _unit_mean(log_sd: float, normal: Array) -> Array:
    """Log-normal factors of mean 1."""
    return np.exp(log_sd * normal - log_sd**2 / 2)


def _autocorrelated(shape: tuple[int, int], generator: np.random.Generator) -> Array:
    """AR(1) noise of unit variance along the steps."""
    noise_ST = generator.normal(size=shape)
    fresh = np.sqrt(1 - AUTOCORRELATION**2)
    for step in range(1, shape[1]):
        noise_ST[:, step] = AUTOCORRELATION * noise_ST[:, step - 1] + fresh * noise_ST[:, step]
    return noise_ST
