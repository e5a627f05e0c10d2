"""How many log-probs of sampled tokens differ in any bit, at every step of a verl run.

Imported in verl's processes, where `+exact=on` names it, before verl's trainer looks for its
metrics. The metric has verl's name (its pull request 8025); above zero it ends the run.
"""

from functools import wraps
from typing import Any

from verl.utils.debug import metrics

COUNT = "training/rollout_logprobs_mismatch_count"

calculate_debug_metrics = metrics.calculate_debug_metrics


@wraps(calculate_debug_metrics)
def with_count(data: Any) -> dict[str, float]:
    """verl's metrics and the count.

    Raises:
        ValueError: it is not zero; names the first sequence and position.
    """
    found: dict[str, float] = calculate_debug_metrics(data)
    ours_BT, theirs_BT = data.batch["old_log_probs"], data.batch["rollout_log_probs"]
    mask_BT = data.batch["response_mask"][:, -ours_BT.shape[1] :].bool()
    differs_BT = (ours_BT != theirs_BT) & mask_BT
    found[COUNT] = float(differs_BT.sum())
    if found[COUNT]:
        row, column = differs_BT.nonzero()[0].tolist()
        raise ValueError(
            f"exact: {int(found[COUNT])} of {int(mask_BT.sum())} log-probs differ, first of "
            f"response {row} at token {column}: {float(ours_BT[row, column])!r} in training, "
            f"{float(theirs_BT[row, column])!r} in vLLM: python -m qat_core.doctor finds the layer"
        )
    return found


metrics.calculate_debug_metrics = with_count
