"""When runs collapse: definition, shares with exact intervals, and tests between arms.

docs/protocols/collapse.md says why these and no others. Times are steps; None stands for a run
that had not collapsed at its last step.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import comb
from typing import Literal, NamedTuple

import numpy as np
import scipy

from analysis.stats import Array, Interval
from experiments.study.protocol import COLLAPSE

Time = int | None

WINDOW = COLLAPSE.window_steps
LOST_SHARE = COLLAPSE.lost_share  # of the best smoothed reward so far
# means of counts over a batch that is no power of two are not exact: half may come out below half;
# means that do differ are further apart, by one response of a window's
_ROUNDING = 1e-12
_TIE = 1e-9  # statistics of permutations this close are equal
_DIVISIONS_AT_ONCE = 1 << 16  # memory is of so many
# all divisions count up to 12 runs an arm (2.7 million), which take ten seconds if no two runs end
# alike; else some are drawn
MOST_DIVISIONS, NUM_DRAWN = 3_000_000, 3 * _DIVISIONS_AT_ONCE
MOST_SIGNS = 17  # likewise of changes of signs


class Outcome(NamedTuple):
    """What became of one run."""

    collapsed: Time  # step of the collapse
    num_steps: int  # of the run
    area: float  # mean reward over all steps
    gain: float  # mean reward of the last 20 steps less that of the first 20
    base: str = ""  # digest of the checkpoint that it began with


def smoothed(reward_T: Array) -> Array:
    """Mean over each step and those before it, (steps - WINDOW + 1,); empty for a short run."""
    if len(reward_T) < WINDOW:
        return np.empty(0)
    sums: Array = np.lib.stride_tricks.sliding_window_view(reward_T, WINDOW).sum(-1)
    return sums / WINDOW


def time_to_collapse(reward_T: Array) -> Time:
    """First step, from 1, whose smoothed reward is below half of the best one up to it.

    A run that is never rewarded has lost all before anything could be seen: it does not survive
    its first window.
    """
    smooth = smoothed(reward_T)
    if len(smooth) and not reward_T.any():
        return WINDOW
    lowest = LOST_SHARE * np.maximum.accumulate(smooth) * (1 - _ROUNDING)
    lost = np.flatnonzero(smooth < lowest)
    return int(lost[0]) + WINDOW if len(lost) else None


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
    """A comparison of two arms."""

    p_value: float  # two-sided
    first_is_earlier: bool  # whether the first arm collapses earlier than expected


def log_rank(first: Sequence[Outcome], second: Sequence[Outcome]) -> Test:
    """Log-rank test with its permutation distribution; p is 1 where no run collapsed.

    The distribution is exact up to 12 runs an arm, else of NUM_DRAWN drawn divisions and the
    observed one (Phipson and Smyth 2010).

    The statistic is that of Mantel 1966: collapses of an arm less those expected under one hazard
    for both, over their standard deviation. Runs that ended alike are of one kind, and a division
    is how many of each kind it puts first. Suffixes: P divisions, R runs, G kinds of them, K steps
    with a collapse.
    """
    runs = [*first, *second]
    ends_R = [(it.collapsed or it.num_steps, it.collapsed is not None) for it in runs]
    kinds = sorted(set(ends_R))
    kind_RG = np.array([[it == kind for kind in kinds] for it in ends_R], dtype=float)
    time_G, collapsed_G = (np.array(it) for it in zip(*kinds, strict=True))
    step_K1 = np.unique(time_G[collapsed_G])[:, None]
    at_risk_KG = time_G >= step_K1
    events_KG = (time_G == step_K1) & collapsed_G
    at_risk_K, events_K = (it_KG @ kind_RG.sum(0) for it_KG in (at_risk_KG, events_KG))
    spread_K = events_K * (at_risk_K - events_K) / np.maximum(at_risk_K - 1, 1)

    def statistics(first_PG: Array) -> Array:
        share_PK = first_PG @ at_risk_KG.T / at_risk_K
        excess_P = (first_PG @ events_KG.T - share_PK * events_K).sum(1)
        deviation_P = np.sqrt((share_PK * (1 - share_PK) * spread_K).sum(1))
        statistic_P: Array = np.divide(
            excess_P, deviation_P, where=deviation_P > 0, out=excess_P * 0
        )
        return statistic_P

    observed = float(statistics(kind_RG[: len(first)].sum(0, keepdims=True))[0])
    num_as_far = num_divisions = 0
    for first_PG, ways_P in _divisions(kind_RG, len(first)):
        is_as_far_P = abs(statistics(first_PG)) >= abs(observed) - _TIE
        num_as_far += int(ways_P[is_as_far_P].sum())
        num_divisions += int(ways_P.sum())
    return Test(num_as_far / num_divisions, observed > 0)


def takes_all_divisions(num_runs: int, num_first: int) -> bool:
    """Whether the log-rank test is exact."""
    return comb(num_runs, num_first) <= MOST_DIVISIONS


def takes_all_signs(num_pairs: int) -> bool:
    """Whether the sign-flip test is exact."""
    return num_pairs <= MOST_SIGNS


def _divisions(kind_RG: Array, num_first: int) -> Iterator[tuple[Array, Array]]:
    """How many runs of each kind are put first, and by how many choices, in parts."""
    if takes_all_divisions(len(kind_RG), num_first):
        first_PG, ways_P = _all_divisions(kind_RG.sum(0).astype(int), num_first)
        for start in range(0, len(ways_P), _DIVISIONS_AT_ONCE):
            part = slice(start, start + _DIVISIONS_AT_ONCE)
            yield first_PG[part].astype(float), ways_P[part]
        return
    random = np.random.default_rng(0)
    yield kind_RG[:num_first].sum(0, keepdims=True), np.ones(1)
    for _ in range(NUM_DRAWN // _DIVISIONS_AT_ONCE):
        drawn_PR = random.random((_DIVISIONS_AT_ONCE, len(kind_RG)))
        last_P1 = np.partition(drawn_PR, num_first - 1, axis=1)[:, num_first - 1 : num_first]
        yield (drawn_PR <= last_P1) @ kind_RG, np.ones(_DIVISIONS_AT_ONCE)


def _all_divisions(size_G: Array, num_first: int) -> tuple[Array, Array]:
    """All ways to put runs first, kind after kind, and by how many choices each comes about."""
    first_PG, ways_P = np.empty((1, 0), np.uint8), np.ones(1, int)
    for size, num_after in zip(size_G, size_G.sum() - size_G.cumsum(), strict=True):
        chosen = np.tile(np.arange(size + 1, dtype=np.uint8), len(ways_P))
        ways_P = np.outer(ways_P, [comb(size, num) for num in range(size + 1)]).ravel()
        first_PG = np.column_stack([np.repeat(first_PG, size + 1, axis=0), chosen])
        num_left_P = num_first - first_PG.sum(1, dtype=int)
        can_be_P = (num_left_P >= 0) & (num_left_P <= num_after)
        first_PG, ways_P = first_PG[can_be_P], ways_P[can_be_P]
    return first_PG, ways_P


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
