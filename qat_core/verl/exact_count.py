"""The count of log-probs that differ, at every step of a verl run; above zero it ends the run.

Imported in verl's processes, where `+exact=on` names it, before verl's trainer looks for its
metrics.
"""

from functools import wraps
from typing import Any

from verl.utils.debug import metrics

from qat_core.exact.count import require_equal

calculate_debug_metrics = metrics.calculate_debug_metrics


@wraps(calculate_debug_metrics)
def with_count(data: Any) -> dict[str, float]:
    """verl's metrics and the count; ValueError where it is not zero."""
    found: dict[str, float] = calculate_debug_metrics(data)
    ours_BT, theirs_BT = data.batch["old_log_probs"], data.batch["rollout_log_probs"]
    mask_BT = data.batch["response_mask"][:, -ours_BT.shape[1] :]
    return found | require_equal(ours_BT, theirs_BT, mask_BT)


metrics.calculate_debug_metrics = with_count
