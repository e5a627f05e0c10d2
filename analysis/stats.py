"""Intervals for comparisons of arms: a seeded, hierarchical bootstrap.

The unit of replication is the seed. Runs of one seed start from the same checkpoint and see the
same prompts in the same order, so arms are paired by seed, step and prompt, and a resample draws
the same seeds, steps and prompts for both arms. Steps of a run depend on each other: they are drawn
in circular blocks of about T**(1/3) steps (Politis and Romano 1992; Kuensch 1989 for the length).
Summaries follow Agarwal et al. 2021, "Deep RL at the edge of the statistical precipice".

What it cannot do: with n seeds a percentile bootstrap sees (n - 1) / n of the variance between
seeds. With two seeds that is half of it and only three distinct draws exist. In simulated studies
of 30 correlated steps, intervals called 95 % held the true ratio in 94 % (five seeds alike), 88 %
(five seeds that differ by 20 %), 89 % (two alike) and 77 % (two that differ): see the unit tests.
So with two seeds read an interval as a rough one.

Suffixes: R resamples, S seeds, T steps, P prompts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

Array = np.ndarray
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]

NUM_RESAMPLES = 10_000
LEVEL = 0.95
SEED = 0


@dataclass(frozen=True)
class Interval:
    """A point estimate and its two-sided interval of level `LEVEL`."""

    estimate: float
    low: float
    high: float

    def judge(self, low: float = -np.inf, high: float = np.inf) -> Verdict:
        """PASS if the whole interval lies in [low, high], FAIL if all of it lies outside.

        An interval that straddles a bound, or an undefined one, is INCONCLUSIVE.
        """
        if low <= self.low and self.high <= high:
            return "PASS"
        return "FAIL" if self.high < low or self.low > high else "INCONCLUSIVE"


def seeded_generator() -> np.random.Generator:
    """A new generator: each interval uses the same draws, so that adding one moves no other."""
    return np.random.default_rng(SEED)


def mean(values_ST: Array) -> Array:
    """Mean over seeds and steps, (..., seeds, steps) to (...)."""
    return np.asarray(values_ST.mean((-2, -1)))


def interquartile_mean(values_ST: Array) -> Array:
    """Mean of the middle half of seeds and steps together: a few outlier steps cannot move it."""
    flat = values_ST.reshape(*values_ST.shape[:-2], -1)
    return np.asarray(stats.trim_mean(flat, 0.25, axis=-1))


def ratio(
    numerator_ST: Array,
    denominator_ST: Array,
    rng: np.random.Generator,
    average: Callable[[Array], Array] = mean,
) -> Interval:
    """Average of one arm over that of another, both over all seeds and steps (seeds, steps)."""
    assert numerator_ST.shape == denominator_ST.shape, "arms are compared step by step"
    seeds_RS1, steps_RST = _draw_seeds_and_steps(rng, *numerator_ST.shape)
    top_R = average(numerator_ST[seeds_RS1, steps_RST])
    bottom_R = average(denominator_ST[seeds_RS1, steps_RST])
    return _interval(average(numerator_ST) / average(denominator_ST), top_R / bottom_R)


def gain(values_ST: Array, num_first: int, num_last: int, rng: np.random.Generator) -> Interval:
    """Mean of the last steps less that of the first, over seeds (seeds, steps).

    Steps are drawn one by one inside either window: the windows are too short for blocks.
    """
    num_seeds, num_steps = values_ST.shape
    assert num_first + num_last <= num_steps, "the windows overlap"
    seeds_RS1 = rng.integers(num_seeds, size=(NUM_RESAMPLES, num_seeds, 1))
    first_RSF = rng.integers(num_first, size=(NUM_RESAMPLES, num_seeds, num_first))
    last_RSL = num_steps - 1 - rng.integers(num_last, size=(NUM_RESAMPLES, num_seeds, num_last))
    gain_R = values_ST[seeds_RS1, last_RSL].mean((1, 2))
    gain_R = gain_R - values_ST[seeds_RS1, first_RSF].mean((1, 2))
    return _interval(values_ST[:, -num_last:].mean() - values_ST[:, :num_first].mean(), gain_R)


def mean_over_prompts(rates_SP: Array, rng: np.random.Generator) -> Interval:
    """Mean over seeds and prompts (seeds, prompts), drawn crossed: each seed has all prompts.

    Given the difference of two arms' success rates it is the paired comparison of their accuracies.
    Two one-sided tests (TOST) at level a call arms equivalent within a margin if the interval of
    level 1 - 2a lies inside it: `judge(-margin, margin)` is TOST at 2.5 %.
    """
    num_seeds, num_prompts = rates_SP.shape
    counts_RS = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), NUM_RESAMPLES)
    prompts_RP = rng.integers(num_prompts, size=(NUM_RESAMPLES, num_prompts))
    over_seeds_RP = counts_RS @ rates_SP / num_seeds
    mean_R = np.take_along_axis(over_seeds_RP, prompts_RP, axis=1).mean(1)
    return _interval(rates_SP.mean(), mean_R)


def _draw_seeds_and_steps(
    rng: np.random.Generator, num_seeds: int, num_steps: int
) -> tuple[Array, Array]:
    """Indices (R, S, 1) of seeds and (R, S, T) of steps in circular blocks."""
    block = max(1, round(num_steps ** (1 / 3)))
    num_blocks = -(-num_steps // block)
    seeds_RS1 = rng.integers(num_seeds, size=(NUM_RESAMPLES, num_seeds, 1))
    starts = rng.integers(num_steps, size=(NUM_RESAMPLES, num_seeds, num_blocks, 1))
    steps = (starts + np.arange(block)) % num_steps
    steps_RST = steps.reshape(NUM_RESAMPLES, num_seeds, -1)[:, :, :num_steps]
    return seeds_RS1, steps_RST


def _interval(estimate: float | Array, resampled_R: Array) -> Interval:
    # "nearest" picks a resample and never interpolates, so infinite ratios stay well-defined
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled_R, [tail, 1 - tail], method="nearest")
    return Interval(float(estimate), float(low), float(high))
