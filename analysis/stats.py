"""Estimates and intervals of a study: Student's t over its seeds.

The unit of replication is the seed: a run is one draw, however many steps, tokens and prompts it
has. Arms of one seed start from the same checkpoint and see the same prompts, so they are compared
within a seed, and the interval is that of the seeds' own comparisons: of log ratios for k3 KL, of
differences in log-odds for accuracies, of plain differences for rewards. One seed has no interval.

The mean of k3 KL has a heavy tail: in an MoE single tokens that are routed to another expert make
up most of it. docs/protocols/kl-claim.md says why the mean decides nevertheless, how this interval
was chosen by simulation, and what it covers; docs/history.md has the program.

Suffixes: S seeds, T steps.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

Array = np.ndarray
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]

LEVEL = 0.95
# Of all seeds together, for a verdict on k3 KL: fewer steps miss a spike that comes in 5 % of the
# steps in more than 5 % of studies (0.95**59 = 0.048).
MIN_STEPS = 60
SPIKE = 10.0  # a step above that many times its run's median


@dataclass(frozen=True)
class Interval:
    """A point estimate and its two-sided interval of level `LEVEL`, None of a single seed."""

    estimate: float
    low: float | None
    high: float | None

    def judge(self, low: float = -np.inf, high: float = np.inf) -> Verdict:
        """PASS if the whole interval lies in [low, high], FAIL if all of it lies outside.

        An interval that straddles a bound is INCONCLUSIVE, and so is what has no interval.
        """
        if self.low is None or self.high is None:
            return "INCONCLUSIVE"
        if low <= self.low and self.high <= high:
            return "PASS"
        return "FAIL" if self.high < low or self.low > high else "INCONCLUSIVE"


@dataclass(frozen=True)
class Spikes:
    """Steps that stand out of their runs."""

    count: int  # steps above `SPIKE` times their run's median, of `steps`
    steps: int
    largest: float  # the largest step, in medians of its run


def over_seeds(values_S: Array) -> Interval:
    """Mean of the seeds' values and Student's interval; infinite values leave it unbounded."""
    estimate = float(values_S.mean())
    if len(values_S) == 1:
        return Interval(estimate, None, None)
    if not np.isfinite(estimate):
        bound = values_S[0] if (values_S == values_S[0]).all() else None
        low, high = (bound, bound) if bound is not None else (-np.inf, np.inf)
        return Interval(estimate, low, high)
    quantile = stdtrit(len(values_S) - 1, (1 + LEVEL) / 2)
    reach = float(quantile * values_S.std(ddof=1) / np.sqrt(len(values_S)))
    return Interval(estimate, estimate - reach, estimate + reach)


def geometric_mean(values_S: Array) -> float:
    """Of values that are not negative; `scipy.stats`, which has one too, takes long to import."""
    with np.errstate(divide="ignore"):
        return float(np.exp(np.log(values_S).mean()))


def token_means(kl_ST: Array, tokens_ST: Array) -> Array:
    """Mean over all tokens of each seed's run, from its steps' means and numbers of tokens."""
    return np.asarray((kl_ST * tokens_ST).sum(1) / tokens_ST.sum(1))


def ratio_over_seeds(arm_S: Array, control_S: Array) -> Interval | None:
    """Ratio of two arms' positive values in the typical seed: geometric mean and its interval.

    None where a value is not positive or the control's infinite: such data bound no ratio.
    """
    assert arm_S.shape == control_S.shape, "arms are compared seed by seed"
    if not ((arm_S > 0).all() and (control_S > 0).all() and np.isfinite(control_S).all()):
        return None
    logs = over_seeds(np.log(arm_S / control_S))
    low, high = (None if end is None else float(np.exp(end)) for end in (logs.low, logs.high))
    return Interval(float(np.exp(logs.estimate)), low, high)


def log_odds(correct_S: Array, answers: int) -> Array:
    """Log-odds of a right answer, with half an answer added on either side (Haldane, Anscombe)."""
    return np.asarray(np.log((correct_S + 0.5) / (answers - correct_S + 0.5)))


def gain(values_ST: Array, num_first: int, num_last: int) -> Interval:
    """Mean of the last steps less that of the first, over seeds."""
    assert num_first + num_last <= values_ST.shape[1], "the windows overlap"
    return over_seeds(values_ST[:, -num_last:].mean(1) - values_ST[:, :num_first].mean(1))


def find_spikes(values_ST: Array) -> Spikes | None:
    """Frequency and size of steps far above their run's median; None where a median is 0."""
    medians_S1 = np.median(values_ST, axis=1, keepdims=True)
    if not (medians_S1 > 0).all():
        return None
    factors_ST = values_ST / medians_S1
    return Spikes(int((factors_ST > SPIKE).sum()), factors_ST.size, float(factors_ST.max()))
