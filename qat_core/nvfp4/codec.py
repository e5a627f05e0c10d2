"""Public NVFP4 functions: validate, then run the oracle (CPU) or the Triton kernels (CUDA)."""

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from qat_core.nvfp4 import reference
from qat_core.nvfp4.format import BLOCK_SIZE, BlockScale, PackedTensor, ScalePolicy

Groups = Sequence[Sequence[Tensor]]


def group_amax(groups: Groups) -> list[Tensor]:
    """Largest |bf16(w)| of each group, the weights of which share a global scale.

    Args:
        groups: for each group its members, BF16 or FP32 (..., N, K) with equal leading dimensions.

    Returns:
        For each group an FP32 tensor of the leading dimensions' shape. NaN or infinity in a member
        shows as a non-finite amax: see `require_finite`.
    """
    for index, members in enumerate(groups):
        _check_group(members, f"groups[{index}]")
    return [_maximum([reference.amax(w.detach()) for w in members]) for members in groups]


def global_scale(amax: Tensor, policy: ScalePolicy = "pow2") -> Tensor:
    """FP32 divisor that maps a group's amax to the top of the format's range.

    "amax" is 448 * 6 / amax; "pow2" the largest power of two that is not above it, which makes
    every dequantized value exact in BF16. 1.0 where amax is 0, at most 2**94, NaN where amax is not
    finite. Elementwise: takes any shape.
    """
    if policy not in get_args(ScalePolicy):
        raise ValueError(f"scale policy {policy!r}: use one of {get_args(ScalePolicy)}")
    return reference.global_scale(amax.float(), policy)


def fake_quantize(w: Tensor, global_scale: Tensor, block_scale: BlockScale = "max") -> Tensor:
    """BF16 of w's shape: equal to `dequantize(quantize(w))` in every bit.

    Args:
        w: BF16 or FP32 (..., N, K), K a multiple of 16; FP32 is rounded to BF16 first.
        global_scale: FP32 of w's leading dimensions' shape (0-D for a matrix).
        block_scale: "max" maps a block's largest value to 6, "four_over_six" to 6 or 4, "mse"
            searches the E4M3 scales around; the latter two take the least squared error.
    """
    _check(w, global_scale, block_scale)
    return reference.fake_quantize(w.detach(), global_scale, block_scale)


def quantize(w: Tensor, global_scale: Tensor, block_scale: BlockScale = "max") -> PackedTensor:
    """Pack w; arguments as for `fake_quantize`."""
    _check(w, global_scale, block_scale)
    codes, scales = reference.quantize(w.detach(), global_scale, block_scale)
    return PackedTensor(codes, scales, global_scale)


def dequantize(packed: PackedTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The weight (..., N, K) that `packed` stands for, in `dtype`."""
    values = reference.dequantize(packed.codes, packed.block_scale, packed.global_scale)
    return values.to(dtype)


def _maximum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).amax(0)


def _check_group(members: Sequence[Tensor], name: str) -> None:
    if not members:
        raise ValueError(f"{name} is empty: a group needs at least one weight")
    for w in members:
        _check_weight(w, name)
        if w.shape[:-2] != members[0].shape[:-2]:
            shapes = [tuple(member.shape) for member in members]
            raise ValueError(f"{name}: leading dimensions differ: {shapes}")


def _check(w: Tensor, global_scale: Tensor, block_scale: str) -> None:
    _check_weight(w, "w")
    if w.shape[-1] % BLOCK_SIZE:
        raise ValueError(f"w: last dimension {w.shape[-1]} is not a multiple of {BLOCK_SIZE}")
    if global_scale.dtype != torch.float32 or global_scale.shape != w.shape[:-2]:
        raise ValueError(
            f"global_scale: needs float32 {tuple(w.shape[:-2])}, "
            f"got {global_scale.dtype} {tuple(global_scale.shape)}"
        )
    if global_scale.device != w.device:
        raise ValueError(f"global_scale is on {global_scale.device}, w on {w.device}")
    if block_scale not in get_args(BlockScale):
        raise ValueError(f"block_scale {block_scale!r}: use one of {get_args(BlockScale)}")


def _check_weight(w: Tensor, name: str) -> None:
    if w.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{name}: needs bfloat16 or float32, got {w.dtype}")
    if w.ndim < 2:
        raise ValueError(f"{name}: needs at least two dimensions, got {tuple(w.shape)}")
