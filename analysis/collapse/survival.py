"""When runs collapse: definition, shares with exact intervals, and tests between arms.

docs/protocols/collapse.md says why these and no others. Times are steps; None stands for a run
that had not collapsed at its last step.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import comb
from typing import Literal, NamedTuple

import numpy as np
import scipy

from analysis.stats import Interval

Array = np.ndarray
Time = int | None

WINDOW = 20  # steps
LOST_SHARE = 0.5  # of the best smoothed reward so far
# means of counts over a batch that is no power of two are not exact: half may come out below half;
# means that do differ are further apart, by one response of a window's
_ROUNDING = 1e-12
_TIE = 1e-9  # statistics of permutations this close are equal
_DIVISIONS_AT_ONCE = 1 << 16  # memory is of so many
# all divisions count up to 12 runs an arm (2.7 million), which takes ten seconds; else some drawn
MOST_DIVISIONS, NUM_DRAWN = 3_000_000, 3 * _DIVISIONS_AT_ONCE
MOST_SIGNS = 17  # likewise of changes of signs


class Outcome(NamedTuple):
    """What became of one run.

    Attributes:
        collapsed: step of the collapse.
        num_steps: of the run.
        area: mean reward over all steps.
        gain: mean reward of the last 20 steps less that of the first 20.
        base: digest of the checkpoint that it began with.
    """

    collapsed: Time
    num_steps: int
    area: float
    gain: float
    base: str = ""


def smoothed(reward_T: Array, window: int = WINDOW) -> Array:
    """Mean over each step and those before it, (steps - window + 1,); empty for a short run."""
    if len(reward_T) < window:
        return np.empty(0)
    sums: Array = np.lib.stride_tricks.sliding_window_view(reward_T, window).sum(-1)
    return sums / window


def time_to_collapse(reward_T: Array, window: int = WINDOW) -> Time:
    """First step, from 1, whose smoothed reward is below half of the best one up to it.

    A run that is never rewarded has lost all before anything could be seen: it does not survive
    its first window.
    """
    smooth = smoothed(reward_T, window)
    if len(smooth) and not reward_T.any():
        return window
    lowest = LOST_SHARE * np.maximum.accumulate(smooth) * (1 - _ROUNDING)
    lost = np.flatnonzero(smooth < lowest)
    return int(lost[0]) + window if len(lost) else None


def outcome(reward_T: Array) -> Outcome:
    """Of a run's rewards, one a step."""
    gain = float(reward_T[-WINDOW:].mean() - reward_T[:WINDOW].mean())
    return Outcome(time_to_collapse(reward_T), len(reward_T), float(reward_T.mean()), gain)


def share_collapsed(
    outcomes: Sequence[Outcome], level: float = 0.95, method: Literal["exact", "wilson"] = "exact"
) -> Interval:
    """Share of runs with a collapse, with the exact interval (Clopper, Pearson) or Wilson's."""
    num_collapsed = sum(it.collapsed is not None for it in outcomes)
    bounds = scipy.stats.binomtest(num_collapsed, len(outcomes)).proportion_ci(level, method=method)
    return Interval(num_collapsed / len(outcomes), float(bounds.low), float(bounds.high))


class Test(NamedTuple):
    """A comparison of two arms.

    Attributes:
        p_value: two-sided.
        first_is_earlier: whether the first arm collapses earlier than expected.
    """

    p_value: float
    first_is_earlier: bool


def log_rank(first: Sequence[Outcome], second: Sequence[Outcome]) -> Test:
    """Log-rank test with its permutation distribution; p is 1 where no run collapsed.

    The distribution is exact up to 12 runs an arm, else of NUM_DRAWN drawn divisions and the
    observed one (Phipson and Smyth 2010).

    The statistic is that of Mantel 1966: collapses of an arm less those expected under one hazard
    for both, over their standard deviation. Suffixes: P permutations, R runs, F runs of the first
    arm, K steps with a collapse.
    """
    runs = [*first, *second]
    time_R = np.array([it.num_steps if it.collapsed is None else it.collapsed for it in runs])
    collapsed_R = np.array([it.collapsed is not None for it in runs])
    step_K1 = np.unique(time_R[collapsed_R])[:, None]
    at_risk_KR = time_R >= step_K1
    events_KR = (time_R == step_K1) & collapsed_R
    at_risk_K, events_K = at_risk_KR.sum(1), events_KR.sum(1)
    spread_K = events_K * (at_risk_K - events_K) / np.maximum(at_risk_K - 1, 1)

    def statistics(first_PF: Array) -> Array:
        """Of divisions, each the indices of the runs that it puts first."""
        chosen_PR = np.zeros((len(first_PF), len(runs)))
        np.put_along_axis(chosen_PR, first_PF, 1.0, axis=1)
        share_PK = chosen_PR @ at_risk_KR.T / at_risk_K
        excess_P = (chosen_PR @ events_KR.T - share_PK * events_K).sum(1)
        deviation_P = np.sqrt((share_PK * (1 - share_PK) * spread_K).sum(1))
        statistic_P: Array = np.divide(
            excess_P, deviation_P, where=deviation_P > 0, out=excess_P * 0
        )
        return statistic_P

    observed = float(statistics(np.arange(len(first))[None])[0])
    num_as_far = num_divisions = 0
    for division_PF in _divisions(len(runs), len(first)):
        is_as_far_P = abs(statistics(division_PF)) >= abs(observed) - _TIE
        num_as_far += int(is_as_far_P.sum())
        num_divisions += len(division_PF)
    return Test(num_as_far / num_divisions, observed > 0)


def takes_all_divisions(num_runs: int, num_first: int) -> bool:
    """Whether the log-rank test is exact."""
    return comb(num_runs, num_first) <= MOST_DIVISIONS


def takes_all_signs(num_pairs: int) -> bool:
    """Whether the sign-flip test is exact."""
    return num_pairs <= MOST_SIGNS


def _divisions(num_runs: int, num_first: int) -> Iterator[Array]:
    """Indices of the runs that are put first, (divisions, first), in parts."""
    if takes_all_divisions(num_runs, num_first):
        divisions_PF = _all_divisions(num_runs, num_first)
        for start in range(0, len(divisions_PF), _DIVISIONS_AT_ONCE):
            yield divisions_PF[start : start + _DIVISIONS_AT_ONCE].astype(np.intp)
        return
    random = np.random.default_rng(0)
    yield np.arange(num_first)[None]
    for _ in range(NUM_DRAWN // _DIVISIONS_AT_ONCE):
        yield random.random((_DIVISIONS_AT_ONCE, num_runs)).argsort(1)[:, :num_first]


def _all_divisions(num_runs: int, num_first: int) -> Array:
    """All choices of runs, ascending; from each begun choice follow those with one index more."""
    begun_PF, last_P = np.empty((1, 0), np.uint8), np.array([-1])
    for num_left in reversed(range(num_first)):
        num_next_P = num_runs - num_left - 1 - last_P
        before_P = np.cumsum(num_next_P) - num_next_P
        last_P = np.arange(num_next_P.sum()) + np.repeat(last_P + 1 - before_P, num_next_P)
        begun_PF = np.column_stack(
            [np.repeat(begun_PF, num_next_P, axis=0), last_P.astype(np.uint8)]
        )
    return begun_PF


def holm(p_values: Sequence[float], num_tests: int) -> list[float]:
    """The p-values corrected after Holm 1979 for the number of tests, in the order given.

    Tests that cannot be made yet count as the least significant: whatever they come to, no
    corrected p-value grows.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, (num_tests - rank) * p_values[index]))
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
    bounds = scipy.stats.ttest_1samp(differences, 0.0).confidence_interval(level)
    return Interval(float(differences.mean()), float(bounds.low), float(bounds.high))


def difference_of_shares(
    first: Sequence[Outcome], second: Sequence[Outcome], level: float
) -> Interval:
    """Share of runs with a collapse, first less second, with Newcombe's interval.

    Method 10 of Newcombe 1998, from Wilson's intervals of the shares. The pairing by seed is not
    used, which is conservative if the outcomes of a seed go together.
    """
    shares = [share_collapsed(outcomes, level, "wilson") for outcomes in (first, second)]
    share, low, high = np.array([(it.estimate, it.low, it.high) for it in shares]).T
    difference = share[0] - share[1]
    below = np.hypot(share[0] - low[0], high[1] - share[1])
    above = np.hypot(high[0] - share[0], share[1] - low[1])
    return Interval(float(difference), float(difference - below), float(difference + above))


def sign_flip_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p-value of the mean of first - second over changes of their signs.

    Over all of them up to MOST_SIGNS pairs, else over NUM_DRAWN drawn ones.
    """

    def mean_difference(first: Array, second: Array, axis: int) -> Array:
        difference: Array = np.mean(np.subtract(first, second), axis=axis)
        return difference

    tested = scipy.stats.permutation_test(
        (first, second),
        mean_difference,
        permutation_type="samples",
        n_resamples=np.inf if takes_all_signs(len(first)) else NUM_DRAWN,
        batch=_DIVISIONS_AT_ONCE,
        rng=np.random.default_rng(0),
    )
    return float(tested.pvalue)


def show_difference(interval: Interval) -> str:
    """A difference of rewards with its interval."""
    return f"{interval.estimate:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"
