"""The count of log-probs that differ, at every step of a verl run; above zero it ends the run.

Imported in verl's processes, where `+exact=on` names it, before verl's trainer looks for its
metrics.
"""

from functools import wraps
from typing import Any

from verl.utils.debug import metrics
from verl.utils.tracking import Tracking

from qat_core.exact.count import COUNT, require_equal

UPDATED = "actor/grad_norm"  # of every step that has trained
calculate_debug_metrics = metrics.calculate_debug_metrics
log = Tracking.log


@wraps(calculate_debug_metrics)
def with_count(data: Any) -> dict[str, float]:
    """verl's metrics and the count; ValueError where it is not zero."""
    found: dict[str, float] = calculate_debug_metrics(data)
    ours_BT, theirs_BT = data.batch["old_log_probs"], data.batch["rollout_log_probs"]
    mask_BT = data.batch["response_mask"][:, -ours_BT.shape[1] :]
    return found | require_equal(ours_BT, theirs_BT, mask_BT)


@wraps(log)
def require_count(self: Tracking, data: dict[str, Any], step: int, **given: Any) -> None:
    """Logs a step; ValueError where the trainer has trained and counted nothing."""
    if UPDATED in data and COUNT not in data:
        raise ValueError(
            f"exact: step {step}: this trainer does not call verl's calculate_debug_metrics, so "
            "that no log-prob was compared; use verl.trainer.main_ppo, see docs/exact.md"
        )
    log(self, data, step, **given)


metrics.calculate_debug_metrics = with_count
Tracking.log = require_count
