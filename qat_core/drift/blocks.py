"""Measures of blocks of 16 weights against their NVFP4 form.

Symbols: w the weights, s / g the value of code 1 in a block (block scale over global scale),
r = |w| / (s / g), and w' the rounded weights. Suffixes: T blocks.
"""

import torch
from torch import Tensor

from qat_core.nvfp4 import PackedTensor, dequantize
from qat_core.options import BLOCK_SIZE

E4M3_SMALLEST, E4M3_LARGEST = 2.0**-6, 448.0
# where r is rounded to one code below and to the next above, and the distance of those two
THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
SPACINGS = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0)


def measure(w_T16: Tensor, codes_T8: Tensor, scale_T1: Tensor, global_T1: Tensor) -> Tensor:
    """For each block, FP32 (T, 5); nothing waits for a GPU.

    0. |w - w'|**2, squared Euclidean norm.
    1. |w|**2.
    2. 1 if its scale is the largest there is and a weight, as BF16, lies beyond code 6: saturated.
       r itself may be a last place above 6 of a weight that is stored exactly.
    3. 1 if its scale is the smallest there is and all codes are zero, though w is not: zeroed.
    4. mean distance of r to the nearest rounding threshold, over half the distance of the two
       codes it separates, at most 1. Weights spread evenly between codes have 0.5.
    """
    w_T16, scale_T1, ones = w_T16.float(), scale_T1.float(), torch.ones_like(scale_T1)
    step_T1 = scale_T1 / global_T1
    unscaled = PackedTensor(codes_T8, ones, global_T1.new_ones(()))
    error_T16 = w_T16 - dequantize(unscaled, torch.float32) * step_T1
    ratio_T16 = w_T16.abs() / step_T1
    top_T1 = ratio_T16.amax(-1, keepdim=True)
    all_zero_T1 = (codes_T8 & 0x77 == 0).all(-1, keepdim=True)
    columns = (
        error_T16.square().sum(-1, keepdim=True),
        w_T16.square().sum(-1, keepdim=True),
        (scale_T1 == E4M3_LARGEST) & (top_T1.bfloat16() > 6),
        (scale_T1 == E4M3_SMALLEST) & all_zero_T1 & (top_T1 > 0),
        _threshold_distance(ratio_T16).mean(-1, keepdim=True),
    )
    return torch.cat([column.float() for column in columns], -1)


def flipped(before_T8: Tensor, after_T8: Tensor) -> Tensor:
    """Share of each block's 4-bit codes that stand for another value, FP32 (T, 1)."""
    pairs = zip(_code_values(before_T8), _code_values(after_T8), strict=True)
    shares = [(old != new).float().mean(-1, keepdim=True) for old, new in pairs]
    return (shares[0] + shares[1]) / 2


def chosen_blocks(shape: torch.Size, count: int, generator: torch.Generator) -> Tensor:
    """Rows of `weight.view(*lead, -1, 16)` to look at, ascending int64 (n,), the same each expert.

    `count` is of blocks of the whole weight, at least one an expert.
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
