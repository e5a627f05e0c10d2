"""How many log-probs of sampled tokens differ in any bit between training and rollouts."""

from torch import Tensor


class NotExact(ValueError):
    """Some log-probs differ.

    Attributes:
        row: of the first response that has one.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


COUNT = "training/rollout_logprobs_mismatch_count"  # verl's name for it, in its pull request 8025


def require_equal(ours_BT: Tensor, theirs_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """The metric, which is 0.

    Args:
        ours_BT: log-probs of sampled tokens in training, FP32 (B, T).
        theirs_BT: as the rollout engine told them, FP32 (B, T).
        mask_BT: not 0 on response tokens.

    Raises:
        NotExact: some differ; names the first response and token.
    """
    differs_BT = (ours_BT != theirs_BT) & mask_BT.bool()
    count = int(differs_BT.sum())
    if count:
        row, column = differs_BT.nonzero()[0].tolist()
        raise NotExact(
            f"exact: {count} of {int(mask_BT.bool().sum())} log-probs differ, first of response "
            f"{row} at token {column}: {float(ours_BT[row, column])!r} in training, "
            f"{float(theirs_BT[row, column])!r} in the rollout: qat-core doctor --exact "
            "says where it begins, see docs/exact.md",
            row,
        )
    return {COUNT: 0.0}
