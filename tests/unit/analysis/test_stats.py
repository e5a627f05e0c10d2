"""Intervals and verdicts, collapse and survival, against cases worked out by hand."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats as scipy_stats

from analysis.collapse import survival
from analysis.collapse.survival import (
    Outcome,
    critical_rate,
    difference_of_shares,
    holm,
    log_rank,
    outcome,
    paired_difference,
    share_collapsed,
    sign_flip_p,
    time_to_collapse,
)
from analysis.stats import (
    Interval,
    Spikes,
    find_spikes,
    gain,
    over_seeds,
    ratio_over_seeds,
    token_means,
)

positive = arrays(float, st.integers(2, 6), elements=st.floats(0.1, 10))


@given(positive)
def test_interval_is_students(values_S: np.ndarray) -> None:
    interval = over_seeds(values_S)
    error = scipy_stats.sem(values_S)
    low, high = scipy_stats.t.interval(0.95, len(values_S) - 1, values_S.mean(), max(error, 1e-300))
    # rounding of some ten operations
    assert (interval.low, interval.high) == pytest.approx((low, high), rel=1e-12, abs=1e-12)


def test_one_seed_has_an_estimate_and_no_interval() -> None:
    assert over_seeds(np.array([3.0])) == Interval(3.0, None, None)
    assert over_seeds(np.array([3.0])).judge(high=9) == "INCONCLUSIVE"
    assert ratio_over_seeds(np.array([3.0]), np.array([2.0])) == Interval(
        pytest.approx(1.5), None, None
    )


@given(positive)
def test_an_arm_over_itself_is_exactly_one(values_S: np.ndarray) -> None:
    assert ratio_over_seeds(values_S, values_S) == Interval(1.0, 1.0, 1.0)


def test_infinite_in_all_seeds_is_infinite_and_in_some_unbounded() -> None:
    ones = np.ones(3)
    everywhere = ratio_over_seeds(np.full(3, np.inf), ones)
    assert everywhere == Interval(np.inf, np.inf, np.inf)
    assert everywhere is not None and everywhere.judge(low=30) == "PASS"
    somewhere = ratio_over_seeds(np.array([1.0, np.inf, 1.0]), ones)
    assert somewhere == Interval(np.inf, 0.0, np.inf)
    assert somewhere is not None and somewhere.judge(low=30) == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("arm", "control"), [(0.0, 1.0), (1.0, 0.0), (1.0, np.inf)], ids=["arm", "floor", "overflow"]
)
def test_zero_or_infinite_floor_bounds_no_ratio(arm: float, control: float) -> None:
    assert ratio_over_seeds(np.array([arm, 1.0]), np.array([control, 1.0])) is None


@pytest.mark.parametrize(
    ("low", "high", "bounds", "verdict"),
    [
        *((*it, {"high": 2.0}, "PASS") for it in ((1.0, 1.9), (1.0, 2.0))),
        (2.1, 3.0, {"high": 2.0}, "FAIL"),
        (1.9, 2.1, {"high": 2.0}, "INCONCLUSIVE"),
        (-0.04, 0.04, {"low": -0.05, "high": 0.05}, "PASS"),
        (-0.06, 0.01, {"low": -0.05, "high": 0.05}, "INCONCLUSIVE"),
        (0.06, 0.2, {"low": -0.05, "high": 0.05}, "FAIL"),
    ],
)
def test_a_verdict_needs_the_whole_interval(
    low: float, high: float, bounds: dict[str, float], verdict: str
) -> None:
    assert Interval((low + high) / 2, low, high).judge(**bounds) == verdict


def test_mean_weighs_steps_by_their_tokens() -> None:
    kl_ST, tokens_ST = np.array([[1.0, 4.0]]), np.array([[3.0, 1.0]])
    assert token_means(kl_ST, tokens_ST) == pytest.approx([1.75])


def test_gain_is_last_window_less_first() -> None:
    values_ST = np.array([[0.0, 0.0, 0.5, 1.0, 1.0]] * 2)
    assert gain(values_ST, num_first=2, num_last=2) == Interval(1.0, 1.0, 1.0)


def test_spikes_are_counted_against_their_own_run() -> None:
    values_ST = np.ones((2, 30))
    values_ST[1] = 100.0  # a run at another level has no spikes
    values_ST[0, 7], values_ST[0, 9] = 11.0, 9.0
    found = find_spikes(values_ST)
    assert found == Spikes(count=1, steps=60, largest=11.0)


def test_spikes_are_not_defined_where_a_median_is_zero() -> None:
    values_ST = np.ones((2, 5))
    values_ST[1, :3] = 0.0
    assert find_spikes(values_ST) is None


def died(*steps: int) -> list[Outcome]:
    return [Outcome(step, 200, 0.5, 0.1) for step in steps]


def lived(count: int) -> list[Outcome]:
    return [Outcome(None, 200, 0.9, 0.1)] * count


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        pytest.param([1.0] * 50, None, id="steady"),
        # from step 31 on 0: the mean of 20 is below 0.5 with 11 zeros, at step 41
        pytest.param([1.0] * 30 + [0.0] * 30, 41, id="dies"),
        # exactly half is not below half
        pytest.param([1.0] * 30 + [0.5] * 30, None, id="halves"),
        pytest.param([1.0] * 30 + [0.49] * 30, 50, id="just below half"),
        pytest.param([1.0] * 30 + [0.0] * 12 + [1.0] * 50, 41, id="recovers"),
        pytest.param([0.0] * 50, 20, id="never rewarded"),
        pytest.param([0.0] * 30 + [1.0] * 30, None, id="learns"),
        pytest.param([1.0] * 10 + [0.0] * 5, None, id="shorter than the window"),
        # the best of the last 20 counts, not of single steps
        pytest.param([0.4] * 20 + [1.0] + [0.4] * 30, None, id="one lucky step"),
    ],
)
def test_time_to_collapse(rewards: list[float], step: int | None) -> None:
    assert time_to_collapse(np.array(rewards)) == step


@pytest.mark.parametrize(("batch", "lost"), [(240, 0), (240, 1), (100, 0), (10**6, 1)])
def test_half_is_half_in_batches_that_are_no_power_of_two(batch: int, lost: int) -> None:
    """Rewards of 20 steps, and then half of each in another order, or one response less."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        halves = rng.integers(batch // 4, batch // 2, 20)
        after = rng.permutation(halves)
        after[-1] -= lost
        collapsed = time_to_collapse(np.concatenate([2 * halves, after]) / batch)
        assert collapsed == (40 if lost else None)


def test_outcome_has_the_mean_reward() -> None:
    assert outcome(np.array([1.0] * 30 + [0.0] * 30)) == Outcome(41, 60, 0.5, -1.0)


@pytest.mark.parametrize(
    ("collapsed", "survived", "low", "high"),
    [
        # of 0 of n the upper bound solves (1 - p)^n = 0.025, of n of n the lower one p^n = 0.025
        pytest.param(0, 5, 0.0, 1 - 0.025 ** (1 / 5), id="none"),
        pytest.param(5, 0, 0.025 ** (1 / 5), 1.0, id="all"),
    ],
)
def test_share_has_the_exact_interval(
    collapsed: int, survived: int, low: float, high: float
) -> None:
    share = share_collapsed(died(*[50] * collapsed) + lived(survived))
    assert share.estimate == collapsed / 5
    assert (share.low, share.high) == pytest.approx((low, high))


@pytest.mark.parametrize(("count", "divisions"), [(5, 252), (10, 184_756)])
def test_log_rank_of_separated_arms_has_the_smallest_p(count: int, divisions: int) -> None:
    dead, alive = died(*range(30, 30 + 10 * count, 10)), lived(count)
    test, mirrored = log_rank(dead, alive), log_rank(alive, dead)
    assert test.first_is_earlier
    assert test.p_value == pytest.approx(2 / divisions), "this one and its mirror image"
    assert not mirrored.first_is_earlier
    assert mirrored.p_value == pytest.approx(test.p_value)


def test_log_rank_by_hand() -> None:
    # two and two, events at 1, 2 | 3 and one censored: among the 6 divisions |Z| is largest for
    # {1, 2} against {3, -} and its mirror image
    test = log_rank(died(1, 2), [*died(3), *lived(1)])
    assert test.p_value == pytest.approx(2 / 6)


def test_log_rank_without_a_collapse_says_nothing() -> None:
    assert log_rank(lived(5), lived(5)).p_value == 1.0


def test_holm() -> None:
    # 3 x 0.01; 2 x 0.02 = 0.04; 1 x 0.03, but no less than the one before
    assert holm([0.03, 0.01, 0.02], 3) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.6, 0.7], 2) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("collapsed", "rate"),
    [
        ({1e-4: 0, 2e-4: 0, 3e-4: 2}, 2e-4),
        ({3e-4: 0, 1e-4: 0, 2e-4: 1}, 1e-4),
        ({1e-4: 1, 2e-4: 0}, None),
        ({1e-4: 0}, 1e-4),
    ],
    ids=["middle", "survival above a collapse does not count", "none", "all"],
)
def test_critical_rate(collapsed: dict[float, int], rate: float | None) -> None:
    assert critical_rate(collapsed) == rate


def test_paired_difference_by_hand() -> None:
    # differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3), t of 2 at 95 %: 2.919986
    interval = paired_difference([0.6, 0.7, 0.8], [0.5, 0.5, 0.5], level=0.90)
    half = 2.919986 * 0.1 / 3**0.5
    assert interval.estimate == pytest.approx(0.2)
    assert (interval.low, interval.high) == pytest.approx((0.2 - half, 0.2 + half), rel=1e-5)


def test_sign_flip_p_by_hand() -> None:
    # of the 16 sums with other signs, as far from 0 as -0.55: itself, +0.55, -0.65 and +0.65
    assert sign_flip_p([0.0, 0.1, 0.2, 0.35], [0.3, 0.3, 0.3, 0.3]) == pytest.approx(4 / 16)
    assert sign_flip_p([0.1] * 10, list(np.linspace(0.2, 0.3, 10))) == pytest.approx(2 / 1024)


def test_log_rank_takes_the_memory_of_some_divisions(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = died(40, 45, 50, 80, 120), [*died(45, 90, 150), *lived(6)]  # divisions: 2002
    all_at_once = log_rank(*runs)
    monkeypatch.setattr(survival, "_DIVISIONS_AT_ONCE", 100)
    tracemalloc.start()
    in_parts = log_rank(*runs)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert in_parts == all_at_once
    assert peak_bytes < 2002 * len([*runs[0], *runs[1]]) * 8, "one float64 a division and run"


def test_a_sampled_log_rank_is_near_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = died(40, 45, 50, 80, 120), [*died(45, 90, 150), *lived(6)]
    exact = log_rank(*runs)
    monkeypatch.setattr(survival, "MOST_DIVISIONS", 2001)
    sampled = log_rank(*runs)
    assert sampled == log_rank(*runs), "the same divisions are drawn"
    # the standard error of a share of 196,608 draws is 0.0011 at most
    assert sampled.p_value == pytest.approx(exact.p_value, abs=0.005)
    assert sampled.p_value != exact.p_value


def test_log_rank_takes_many_runs() -> None:
    test = log_rank([*died(30, 60, 90, 120, 150, 180, 200, 200, 200), *lived(36)], lived(45))
    # by counts alone, Fisher's exact test: 0.0024; the observed division counts as one of all
    assert test.first_is_earlier and 1 / 200_000 < test.p_value < 0.005


def test_difference_of_shares_is_newcombes() -> None:
    # Newcombe 1998, table II, method 10: 56 of 70 less 48 of 80, 95 %
    first, second = ([*died(*[50] * k), *lived(n - k)] for k, n in ((56, 70), (48, 80)))
    interval = difference_of_shares(first, second, 0.95)
    found = (interval.estimate, interval.low, interval.high)
    assert found == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)


def test_sampled_sign_flips_are_near_the_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    first = list(np.random.default_rng(0).normal(0.3, 1.0, 12))
    exact = sign_flip_p(first, [0.0] * 12)
    monkeypatch.setattr(survival, "MOST_SIGNS", 11)
    monkeypatch.setattr(survival, "NUM_DRAWN", 4000)  # of 4096; else all are gone through
    sampled = sign_flip_p(first, [0.0] * 12)
    # the standard error of a share of 4000 draws is 0.008 at most
    assert sampled != exact and sampled == pytest.approx(exact, abs=0.035)
