"""When runs collapse: definition, shares with exact intervals, and tests between arms.

docs/protocols/collapse.md says why these and no others. Times are steps; None stands for a run
that had not collapsed at its last step.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy import stats

from analysis.stats import Interval

Array = np.ndarray
Time = int | None

WINDOW = 20  # steps
LOST_SHARE = 0.5  # of the best smoothed reward so far
_TIE = 1e-9  # statistics of permutations this close are equal


class Outcome(NamedTuple):
    """What became of one run.

    Attributes:
        collapsed: step of the collapse.
        num_steps: of the run.
        area: mean reward over all steps.
    """

    collapsed: Time
    num_steps: int
    area: float


def smoothed(reward_T: Array, window: int = WINDOW) -> Array:
    """Mean over each step and those before it, (steps - window + 1,); empty for a short run."""
    if len(reward_T) < window:
        return np.empty(0)
    # rewards are counts over a power of two, so that sums, and the comparison with half, are exact
    sums: Array = np.lib.stride_tricks.sliding_window_view(reward_T, window).sum(-1)
    return sums / window


def time_to_collapse(reward_T: Array, window: int = WINDOW) -> Time:
    """First step, from 1, whose smoothed reward is below half of the best one up to it."""
    smooth = smoothed(reward_T, window)
    lost = np.flatnonzero(smooth < LOST_SHARE * np.maximum.accumulate(smooth))
    return int(lost[0]) + window if len(lost) else None


def outcome(reward_T: Array) -> Outcome:
    """Of a run's rewards, one a step."""
    return Outcome(time_to_collapse(reward_T), len(reward_T), float(reward_T.mean()))


def share_collapsed(outcomes: Sequence[Outcome]) -> Interval:
    """Share of runs with a collapse, with the exact 95 % interval of Clopper and Pearson."""
    num_collapsed = sum(it.collapsed is not None for it in outcomes)
    bounds = stats.binomtest(num_collapsed, len(outcomes)).proportion_ci(0.95, method="exact")
    return Interval(num_collapsed / len(outcomes), float(bounds.low), float(bounds.high))


def survival_curve(outcomes: Sequence[Outcome]) -> tuple[Array, Array]:
    """Kaplan-Meier estimate: the steps at which a run ended, and the share alive after each."""
    curve = stats.ecdf(_censored(outcomes)).sf
    return np.asarray(curve.quantiles), np.asarray(curve.probabilities)


class Test(NamedTuple):
    """A comparison of two arms.

    Attributes:
        p_value: two-sided.
        first_is_earlier: whether the first arm collapses earlier than expected.
    """

    p_value: float
    first_is_earlier: bool


def log_rank(first: Sequence[Outcome], second: Sequence[Outcome]) -> Test:
    """Log-rank test with its exact permutation distribution; p is 1 where no run collapsed."""
    together = [*first, *second]
    if all(it.collapsed is None for it in together):
        return Test(1.0, False)
    everyone = range(len(together))

    def statistic(chosen: Iterable[int]) -> float:
        inside = set(chosen)
        ours = [together[i] for i in everyone if i in inside]
        theirs = [together[i] for i in everyone if i not in inside]
        return float(stats.logrank(_censored(ours), _censored(theirs)).statistic)

    observed = statistic(range(len(first)))
    drawn = np.array([statistic(chosen) for chosen in combinations(everyone, len(first))])
    p_value = float((np.abs(drawn) >= abs(observed) - _TIE).mean())
    # the statistic is that of the events of the first arm: more than expected, so earlier
    return Test(p_value, observed > 0)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for their number after Holm 1979, in the order given."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def critical_rate(collapsed: Mapping[float, int]) -> float | None:
    """Largest learning rate up to which no run collapsed, of the number that did at each."""
    survived = None
    for rate in sorted(collapsed):
        if collapsed[rate]:
            break
        survived = rate
    return survived


def paired_difference(first: Sequence[float], second: Sequence[float], level: float) -> Interval:
    """Mean of first - second, pair by pair, with its t-interval; at least two pairs."""
    differences = np.subtract(first, second)
    bounds = stats.ttest_1samp(differences, 0.0).confidence_interval(level)
    return Interval(float(differences.mean()), float(bounds.low), float(bounds.high))


def _censored(outcomes: Sequence[Outcome]) -> stats.CensoredData:
    times = [it.num_steps if it.collapsed is None else it.collapsed for it in outcomes]
    return stats.CensoredData.right_censored(times, [it.collapsed is None for it in outcomes])
