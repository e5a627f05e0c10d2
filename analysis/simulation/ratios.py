"""How the candidate intervals for a ratio of mean k3 KL do in simulated studies.

Per population, size of a study and candidate: how often the interval holds the true ratio, and how
often it would pass a claim that the ratio is at most BOUND: power where the ratio is 1, type I
error where it is BOUND or more.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from analysis.simulation.candidates import CANDIDATES
from analysis.simulation.generator import AS_RECORDED, NONE, Scenario, Spikes

BOUND = 2.0
STUDIES = {"bootstrap": 200, "t": 1000}  # resampling is slow
SEED_SPREADS = (0.0, 0.2, 0.4, 0.6)
SIZES = ((3, 20), (5, 20), (5, 60), (5, 300))
LONG = 60  # steps beyond which nothing is resampled
HUNDREDFOLD = {frequency: Spikes(frequency, 100, 100) for frequency in (0.01, 0.05, 0.1, 0.2)}


def scenarios() -> Iterator[Scenario]:
    """Quiet arms, arms with the spikes of the first records, and arms that spike by themselves."""
    for spikes, kind in ((NONE, "no spikes"), (AS_RECORDED, "spikes as recorded in both arms")):
        for ratio in (1.0, BOUND):
            for spread in SEED_SPREADS:
                yield Scenario(
                    kind, ratio, seed_sd=spread, arm_spikes=spikes, control_spikes=spikes
                )
    for frequency, spikes in HUNDREDFOLD.items():
        name = f"arm 100 times worse in {frequency:.0%} of the steps"
        yield Scenario(name, spikes.mean_factor, arm_spikes=spikes)
    for frequency in (0.01, 0.05):
        name = f"at the bound, by an arm 100 times worse in {frequency:.0%} of the steps"
        yield Scenario(name, BOUND, arm_spikes=HUNDREDFOLD[frequency])


def simulate_ratios() -> list[dict[str, Any]]:
    """A row a population and size; candidates by name."""
    return [_simulated(scenario.of_size(*size)) for scenario in scenarios() for size in SIZES]


def _simulated(scenario: Scenario) -> dict[str, Any]:
    row: dict[str, Any] = {
        "population": scenario.name,
        **{key: asdict(scenario)[key] for key in ("ratio", "seeds", "steps", "seed_sd")},
    }
    found = {}
    for name in CANDIDATES:
        is_slow = "bootstrap" in name
        if not (is_slow and scenario.steps > LONG):
            found[name] = measure(scenario, name, STUDIES["bootstrap" if is_slow else "t"])
    return row | {"candidates": found}


def measure(scenario: Scenario, candidate: str, studies: int) -> dict[str, float]:
    """Coverage of the true ratio, and share of studies that pass "at most BOUND"."""
    generator = np.random.default_rng(0)
    covered = passed = 0
    for _ in range(studies):
        low, high = CANDIDATES[candidate](*scenario.draw(generator))
        covered += low <= np.log(scenario.ratio) <= high
        passed += high <= np.log(BOUND)
    return {"coverage": covered / studies, "passes": passed / studies}
