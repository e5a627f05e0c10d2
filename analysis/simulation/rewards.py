"""Does the interval of differences of mean reward keep its level, and how often does it decide?

Two arms start each seed from the same base; the seeds' differences are drawn around a true one.
Some populations have seeds that lose more than the others, as runs that collapse do.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy import stats

from analysis.claim_rows import judge
from analysis.collapse.rules import AREA_LEVEL, AREA_MARGIN, COSTS, COSTS_NOTHING
from analysis.stats import Interval

STUDIES = 5000


@dataclass(frozen=True)
class RewardScenario:
    """Seeds, and how their differences are distributed.

    Attributes:
        difference: the true mean, of all seeds.
        seed_sd: of seeds that lose nothing more.
        lost_share: of the seeds that lose `loss` more.
    """

    seeds: int
    difference: float
    seed_sd: float
    lost_share: float
    loss: float


def simulate_rewards() -> list[dict[str, Any]]:
    """Coverage, and how often claims C9 and C4 pass and fail, of every scenario."""
    populations = ((0.02, 0.0, 0.0), (0.08, 0.0, 0.0), (0.02, 0.1, 0.4), (0.05, 0.4, 0.2))
    differences = (0.0, -AREA_MARGIN, -0.15)
    return [
        _simulated(RewardScenario(seeds, difference, *population))
        for seeds, population, difference in product((8, 10), populations, differences)
    ]


def _simulated(scenario: RewardScenario) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    size = (STUDIES, scenario.seeds)
    is_lost_NS = generator.random(size) < scenario.lost_share
    usual = scenario.difference + scenario.lost_share * scenario.loss
    found_NS = generator.normal(usual, scenario.seed_sd, size) - scenario.loss * is_lost_NS
    bounds = stats.ttest_1samp(found_NS, 0.0, axis=1).confidence_interval(AREA_LEVEL)
    intervals = [
        Interval(*map(float, its))
        for its in zip(found_NS.mean(axis=1), bounds.low, bounds.high, strict=True)
    ]
    costs = [judge(it, COSTS) for it in intervals]
    costs_nothing = [judge(it, COSTS_NOTHING) for it in intervals]
    covered_N = (bounds.low <= scenario.difference) & (scenario.difference <= bounds.high)
    return vars(scenario) | {
        "coverage": float(covered_N.mean()),
        "c9_passes": costs.count("PASS") / STUDIES,
        "c9_fails": costs.count("FAIL") / STUDIES,
        "c4_passes": costs_nothing.count("PASS") / STUDIES,
        "c4_fails": costs_nothing.count("FAIL") / STUDIES,
    }
