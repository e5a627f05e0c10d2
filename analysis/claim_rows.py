"""From an estimate and what is required of it to a judged row."""

from typing import Any, Literal

import numpy as np

from analysis.claims_table import Claim
from analysis.stats import Interval, Verdict

# How a threshold binds, and its value; "within" means between -value and value.
Requirement = tuple[Literal["at least", "at most", "within"], float]


def new_claim(
    interval: Interval | None,
    required: Requirement | None,
    obstacle: str | None = None,
    *,
    num_seeds: int,
    detail: str,
    **described: Any,
) -> Claim:
    """A row of the table.

    Args:
        interval: None where the data give no estimate.
        required: None where nothing is claimed.
        obstacle: what keeps the interval from deciding anything.
        num_seeds: a single seed is reported, never judged.
        described: the other fields of `Claim`.
    """
    bound, threshold = required or (None, None)
    return Claim(
        estimate=interval and interval.estimate,
        low=interval and interval.low,
        high=interval and interval.high,
        bound=bound,
        threshold=threshold,
        verdict=_verdict(interval, required, obstacle, num_seeds),
        num_seeds=num_seeds,
        detail="; ".join(filter(None, (detail, obstacle))),
        **described,
    )


def _verdict(
    interval: Interval | None, required: Requirement | None, obstacle: str | None, num_seeds: int
) -> Literal[Verdict, "REPORTED"]:
    is_random = interval is None or interval.low is None or interval.low != interval.high
    if required is None or (num_seeds == 1 and is_random):
        return "REPORTED"
    if interval is None or obstacle is not None:
        return "INCONCLUSIVE"
    bound, threshold = required
    low = {"at least": threshold, "at most": -np.inf, "within": -threshold}[bound]
    return interval.judge(low, np.inf if bound == "at least" else threshold)
