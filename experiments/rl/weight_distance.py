"""How far training has moved the weights, in steps of the grid that NVFP4 rounds them to."""

import torch
from torch import Tensor, nn

from qat_core.nvfp4 import PackedTensor
from qat_core.options import BLOCK_SIZE
from qat_core.planning.plan import QuantPlan
from qat_core.planning.recipe import Recipe
from qat_core.weights.stream import packed_weights


class WeightDistance:
    """Distance from the weights at its making, those of the base checkpoint.

    The step of a block is the finest distance between two neighbours of its grid, half a block
    scale, with the block scales of the base weights; twice and four times as far apart are the
    larger values. Keeps two FP32 copies of the quantized weights.
    """

    def __init__(self, model: nn.Module, plan: QuantPlan, recipe: Recipe) -> None:
        state = model.state_dict()
        packed = dict(packed_weights(plan, recipe, state.__getitem__, resident=True))
        self.names = plan.quantized
        self.base = [_copy(state[name]) for name in self.names]
        self.steps = [
            _steps(packed[name], base) for name, base in zip(self.names, self.base, strict=True)
        ]
        self.num_weights = sum(base.numel() for base in self.base)

    @torch.no_grad()
    def rms(self, model: nn.Module) -> Tensor:
        """Root of the mean, over all quantized weights, of (moved / step)^2, 0-D FP32."""
        state = model.state_dict()
        moved = [_copy(state[name]) for name in self.names]
        torch._foreach_sub_(moved, self.base)
        torch._foreach_div_(moved, self.steps)
        norms = torch._foreach_norm(moved)
        return torch.stack(norms).square().sum().div(self.num_weights).sqrt()


def _copy(weight: Tensor) -> Tensor:
    return weight.to(torch.float32, copy=True)


def _steps(packed: Tensor | PackedTensor, base: Tensor) -> Tensor:
    """Half a block scale, of every weight; infinity in blocks of zeros: they count as not moved."""
    assert isinstance(packed, PackedTensor)
    scale = packed.block_scale.float() / packed.global_scale[..., None, None]
    is_zero = base.reshape(*base.shape[:-1], -1, BLOCK_SIZE).abs().amax(-1) == 0
    return (0.5 * scale).masked_fill(is_zero, torch.inf).repeat_interleave(BLOCK_SIZE, dim=-1)
