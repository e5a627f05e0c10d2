"""Whether stored values are such that every engine computes with them what they say."""

import torch

from qat_core.nvfp4 import PackedTensor
from qat_core.planning.plan import QuantPlan
from qat_core.weights.hub_names import HubNames, Weight

# E4M3 as bytes: 2**-6, the smallest that Marlin does not take for zero, and 448. Signed ones, and
# NaN (0x7F), are larger.
SMALLEST_SCALE, LARGEST_SCALE = 0x08, 0x7E


def require_valid(name: str, weight: Weight, source: str) -> None:
    """ValueError that names a weight which is not finite, or packed with impossible scales."""
    if not isinstance(weight, PackedTensor):
        if weight.is_floating_point() and not torch.isfinite(weight).all():
            raise ValueError(f"{source}: {name}: holds NaN or infinity in {weight.dtype}")
        return
    scale = weight.global_scale
    if not (torch.isfinite(scale).all() and (scale > 0).all()):
        raise ValueError(
            f"{source}: {name}: global scale {scale.tolist()}: not finite and positive"
        )
    stored = weight.block_scale.view(torch.uint8)
    if stored.numel() and (stored.min() < SMALLEST_SCALE or stored.max() > LARGEST_SCALE):
        raise ValueError(
            f"{source}: {name}: a block scale is NaN, negative, zero or below 2**-6, which GPU "
            "kernels take for zero"
        )


class SharedScales:
    """Whether weights that engines run as one matrix have one global scale, as they must."""

    def __init__(self, plan: QuantPlan, names: HubNames, source: str) -> None:
        self._groups = {
            piece.name: (entry.group, piece.expert)
            for entry in plan.entries
            for piece in names.pieces[entry.name]
        }
        self._found: dict[tuple[str | None, int | None], tuple[str, float]] = {}
        self._source = source

    def check(self, name: str, weight: PackedTensor) -> None:
        """ValueError if the scale differs from that of a weight of its group seen before."""
        scale = weight.global_scale.item()
        first, shared = self._found.setdefault(self._groups[name], (name, scale))
        if scale != shared:
            raise ValueError(
                f"{self._source}: {name}: global scale {scale}, but {first} has {shared}: engines "
                "run them as one matrix with one scale"
            )
