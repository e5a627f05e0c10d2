"""k3 of two sets of log-probs, and its interval by a bootstrap over sequences."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from qat_core.mismatch import k3

NUM_RESAMPLES = 2000
LEVEL = 0.95
SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A value and its two-sided percentile interval of level `LEVEL`."""

    value: float
    low: float
    high: float


def k3_per_sequence(to_BT: Tensor, from_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum over each sequence's tokens of k3 with d = to - from, FP64 (B,)."""
    return k3(((to_BT - from_BT) * mask_BT).cpu()).sum(-1)


class Bootstrap:
    """Resamples of sequences, the same ones for every estimate, so that these are paired."""

    def __init__(self, mask_BT: Tensor) -> None:
        self._tokens_B = mask_BT.sum(-1).double().cpu().numpy()
        num = len(self._tokens_B)
        rng = np.random.default_rng(SEED)
        self._counts_RB = rng.multinomial(num, np.full(num, 1 / num), NUM_RESAMPLES)

    def mean(self, sums_B: Tensor) -> Estimate:
        """Mean over tokens of what `sums_B` sums over each sequence's tokens."""
        return self._estimate(sums_B.numpy(), self._tokens_B)

    def ratio(self, top_B: Tensor, bottom_B: Tensor) -> Estimate:
        """Ratio of two such means; 0 where the lower one is 0."""
        return self._estimate(top_B.numpy(), bottom_B.numpy())

    def _estimate(self, top_B: np.ndarray, bottom_B: np.ndarray) -> Estimate:
        tops, bottoms = self._counts_RB @ top_B, self._counts_RB @ bottom_B
        resampled = np.divide(tops, bottoms, out=np.zeros_like(tops), where=bottoms != 0)
        tail = (1 - LEVEL) / 2
        low, high = np.quantile(resampled, [tail, 1 - tail])
        total = bottom_B.sum()
        return Estimate(float(top_B.sum() / total) if total else 0.0, float(low), float(high))
