"""From an estimate and what is required of it to a judged row, with any set of rules."""

from typing import Any, Literal

import numpy as np

from analysis.claims_table import Claim
from analysis.stats import Interval, Verdict
from experiments.study.schema import Study

# How a threshold binds, and its value; "within" means between -value and value.
Requirement = tuple[Literal["at least", "at most", "within"], float]

ONE_CHECKPOINT = "one pretrained checkpoint: verdicts hold for it alone"


def is_pretrained(study: Study, model: str) -> bool:
    """Whether all seeds of a model begin with one checkpoint of others."""
    return study.models[model].kind in ("gguf", "hub")


def new_claim(
    interval: Interval | None,
    required: Requirement | None,
    obstacle: str | None = None,
    *,
    num_seeds: int,
    detail: str,
    exact: bool = False,
    **described: Any,
) -> Claim:
    """A row of the table.

    Args:
        interval: None where the data give no estimate.
        required: None where nothing is claimed.
        obstacle: what keeps the interval from deciding anything.
        num_seeds: a single seed is reported, never judged.
        exact: nothing is random; else seeds that all lie on the bound decide nothing.
        described: the other fields of `Claim`.
    """
    _, threshold = required or (None, None)
    if interval and required and not exact and interval.low == interval.high == threshold:
        obstacle = "no spread between seeds, all on the bound"
    return Claim(
        **numbers_of(interval, required),
        verdict=_verdict(interval, required, obstacle, exact or num_seeds > 1),
        num_seeds=num_seeds,
        exact=exact,
        detail="; ".join(filter(None, (detail, obstacle))),
        **described,
    )


def numbers_of(interval: Interval | None, required: Requirement | None) -> dict[str, Any]:
    """The fields of `Claim` that an interval and what is required of it fill."""
    bound, threshold = required or (None, None)
    return {
        "estimate": interval and interval.estimate,
        "low": interval and interval.low,
        "high": interval and interval.high,
        "bound": bound,
        "threshold": threshold,
    }


def judge(interval: Interval, required: Requirement) -> Verdict:
    """Whether an interval is what is required."""
    bound, threshold = required
    low = {"at least": threshold, "at most": -np.inf, "within": -threshold}[bound]
    return interval.judge(low, np.inf if bound == "at least" else threshold)


def _verdict(
    interval: Interval | None,
    required: Requirement | None,
    obstacle: str | None,
    can_be_judged: bool,
) -> Literal[Verdict, "REPORTED"]:
    if required is None or not can_be_judged:
        return "REPORTED"
    if interval is None or obstacle is not None:
        return "INCONCLUSIVE"
    return judge(interval, required)
