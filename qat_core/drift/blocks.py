"""Measures of some blocks of a weight against their NVFP4 form.

Symbols: w the weights, s / g the value of code 1 in a block (block scale over global scale),
r = |w| / (s / g), and w' the rounded weights.
"""

import torch
from torch import Tensor

from qat_core.nvfp4 import PackedTensor, dequantize
from qat_core.options import BLOCK_SIZE

E4M3_SMALLEST, E4M3_LARGEST = 2.0**-6, 448.0
# where r is rounded to one code below and to the next above, and the distance of those two
THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
SPACINGS = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0)
NAMES = ("relative_error", "saturated_blocks", "zeroed_blocks", "threshold_distance")


def measure(blocks: Tensor, packed: PackedTensor) -> Tensor:
    """The measures of `NAMES`, FP32 (4,); nothing waits for a GPU.

    * relative_error: |w - w'| / |w|, Euclidean norms.
    * saturated_blocks: share with the largest block scale there is and a weight beyond code 6.
    * zeroed_blocks: share with the smallest block scale and only zeros for codes, though w is not.
    * threshold_distance: mean distance of r to the nearest rounding threshold, over half the
      distance of the two codes it separates, at most 1. Weights spread evenly have 0.5.

    Args:
        blocks: w, FP32 or BF16 (..., n, 16).
        packed: the same blocks, quantized.
    """
    w, rounded = blocks.float(), dequantize(packed, torch.float32)
    scale = packed.block_scale.float()
    step = scale / packed.global_scale[..., None, None]
    ratio = w.abs() / step
    top = ratio.amax(-1, keepdim=True)
    saturated = (scale == E4M3_LARGEST) & (top > 6)
    all_zero = (packed.codes & 0x77 == 0).all(-1, keepdim=True)
    zeroed = (scale == E4M3_SMALLEST) & all_zero & (top > 0)
    norm = w.norm().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.stack(
        [
            (w - rounded).norm() / norm,
            saturated.float().mean(),
            zeroed.float().mean(),
            _threshold_distance(ratio).mean(),
        ]
    )


def flipped(before: Tensor, after: Tensor) -> Tensor:
    """Share of 4-bit codes that stand for another value, 0-D FP32; two codes a byte."""
    pairs = zip(_code_values(before), _code_values(after), strict=True)
    return torch.stack([(old != new).float().mean() for old, new in pairs]).mean()


def chosen_blocks(shape: torch.Size, count: int, generator: torch.Generator) -> Tensor:
    """Rows of `weight.view(*lead, -1, 16)` to look at, ascending int64 (n,), the same each expert.

    Args:
        shape: of the weight, (N, K) or (E, N, K).
        count: of blocks of the whole weight, at least one an expert.
        generator: makes the choice.
    """
    *lead, rows, columns = shape
    num_blocks, num_matrices = rows * columns // BLOCK_SIZE, lead[0] if lead else 1
    wanted = min(num_blocks, max(1, count // num_matrices))
    return torch.randperm(num_blocks, generator=generator)[:wanted].sort().values


def _code_values(codes: Tensor) -> tuple[Tensor, Tensor]:
    """The even and the odd codes, without the sign of zeros."""
    halves = codes & 0xF, codes >> 4
    even, odd = (half * ((half & 7) != 0) for half in halves)
    return even, odd


def _threshold_distance(ratio: Tensor) -> Tensor:
    nearest = torch.ones_like(ratio)
    for threshold, spacing in zip(THRESHOLDS, SPACINGS, strict=True):
        nearest = torch.minimum(nearest, (ratio - threshold).abs() / (spacing / 2))
    return nearest
