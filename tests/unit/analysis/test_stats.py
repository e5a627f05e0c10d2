import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats as scipy_stats

from analysis.stats import (
    Interval,
    Spikes,
    find_spikes,
    gain,
    log_odds,
    over_seeds,
    ratio_over_seeds,
    token_means,
)

positive = arrays(float, st.integers(2, 6), elements=st.floats(0.1, 10))


@given(positive)
def test_interval_is_students(values_S: np.ndarray) -> None:
    interval = over_seeds(values_S)
    assert interval.low is not None and interval.high is not None
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
    ("low", "high", "verdict"),
    [(1.0, 1.9, "PASS"), (2.1, 3.0, "FAIL"), (1.9, 2.1, "INCONCLUSIVE"), (1.0, 2.0, "PASS")],
    ids=["below", "above", "straddles", "touches"],
)
def test_verdict_at_most_two(low: float, high: float, verdict: str) -> None:
    assert Interval((low + high) / 2, low, high).judge(high=2.0) == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.04, 0.04, "PASS"), (-0.06, 0.01, "INCONCLUSIVE"), (0.06, 0.2, "FAIL")],
    ids=["equivalent", "straddles", "different"],
)
def test_equivalence_within_a_margin(low: float, high: float, verdict: str) -> None:
    assert Interval(0.0, low, high).judge(-0.05, 0.05) == verdict


def test_mean_weighs_steps_by_their_tokens() -> None:
    kl_ST, tokens_ST = np.array([[1.0, 4.0]]), np.array([[3.0, 1.0]])
    assert token_means(kl_ST, tokens_ST) == pytest.approx([1.75])


def test_log_odds_are_finite_without_a_right_or_wrong_answer() -> None:
    found_S = log_odds(np.array([0, 5, 10]), 10)
    assert np.isfinite(found_S).all()
    assert found_S[1] == 0 and found_S[0] == -found_S[2]


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
