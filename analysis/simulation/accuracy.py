"""Does the interval of accuracies in log-odds keep its level, and how often can it decide?

Two arms answer the same number of prompts in every seed; answers are independent, which leaves out
what pairing by prompt gains. `shift` is the true difference of the arms in log-odds, and each seed
has a difference of its own around it.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from analysis.stats import log_odds, over_seeds

STUDIES = 2000
MARGIN = 0.3
ACCURACY = 0.7


@dataclass(frozen=True)
class AccuracyScenario:
    """Seeds, answers of each, the arms' true difference and its spread over seeds, in log-odds."""

    seeds: int
    answers: int
    shift: float
    seed_sd: float


def simulate_accuracy() -> list[dict[str, Any]]:
    """Coverage, and how often arms are called equivalent within MARGIN, of every scenario."""
    sizes = ((3, 256), (5, 256), (5, 1024))
    scenarios = [
        AccuracyScenario(seeds, answers, shift, seed_sd)
        for (seeds, answers), shift, seed_sd in product(sizes, (0.0, -MARGIN), (0.0, 0.1, 0.2))
    ]
    return [_simulated(scenario) for scenario in scenarios]


def _simulated(scenario: AccuracyScenario) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    base = np.log(ACCURACY / (1 - ACCURACY))
    covered = passed = 0
    for _ in range(STUDIES):
        own_S = generator.normal(scenario.shift, scenario.seed_sd, scenario.seeds)
        arm_S, control_S = (
            log_odds(generator.binomial(scenario.answers, _accuracy(level_S)), scenario.answers)
            for level_S in (base + own_S, np.full(scenario.seeds, base))
        )
        interval = over_seeds(arm_S - control_S)
        assert interval.low is not None and interval.high is not None
        covered += interval.low <= scenario.shift <= interval.high
        passed += interval.judge(-MARGIN, MARGIN) == "PASS"
    return vars(scenario) | {"coverage": covered / STUDIES, "passes": passed / STUDIES}


def _accuracy(log_odds_S: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-log_odds_S)))
