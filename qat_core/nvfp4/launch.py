"""Runs the Triton kernels; the same functions as `reference.py`, for CUDA tensors.

Imported only when a CUDA tensor arrives: a CPU does not need Triton.
"""

from math import prod

import torch
import triton
from torch import Tensor

from qat_core.nvfp4 import kernels
from qat_core.nvfp4.format import ShardLayout
from qat_core.nvfp4.launch_many import (
    TILE_BLOCKS,
    TILE_WARPS,
    aligned,
    group_amax,
    pack_shards,
    quantize_all,
)
from qat_core.options import BLOCK_SIZE, BlockScaleMethod

__all__ = [
    "dequantize",
    "dequantize_into",
    "fake_quantize",
    "group_amax",
    "pack_shards",
    "quantize",
    "quantize_all",
    "unpack_shards",
]


def fake_quantize(w: Tensor, global_scale: Tensor, method: BlockScaleMethod) -> Tensor:
    """As `reference.fake_quantize`."""
    w = aligned(w)
    out = torch.empty(w.shape, dtype=torch.bfloat16, device=w.device)
    arguments = (w, global_scale.contiguous(), out)
    kernel = kernels.fake_quantize_kernel
    _launch(kernel, arguments, w.shape, TILE_WARPS, METHOD=method)
    return out


def quantize(w: Tensor, global_scale: Tensor, method: BlockScaleMethod) -> tuple[Tensor, Tensor]:
    """As `reference.quantize`."""
    w = aligned(w)
    *lead, columns = w.shape
    codes = torch.empty((*lead, columns // 2), dtype=torch.uint8, device=w.device)
    scale = torch.empty((*lead, columns // BLOCK_SIZE), dtype=torch.uint8, device=w.device)
    arguments = (w, global_scale.contiguous(), codes, scale)
    kernel = kernels.quantize_kernel
    num_warps = 1 if method == "max" else TILE_WARPS
    _launch(kernel, arguments, w.shape, num_warps, METHOD=method)
    return codes, scale.view(torch.float8_e4m3fn)


def dequantize(
    codes: Tensor, block_scale: Tensor, global_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """As `reference.dequantize`."""
    shape = torch.Size((*codes.shape[:-1], 2 * codes.shape[-1]))
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    dequantize_into(codes, block_scale, global_scale, out)
    return out


def dequantize_into(codes: Tensor, block_scale: Tensor, global_scale: Tensor, out: Tensor) -> None:
    """As `reference.dequantize`, into contiguous memory."""
    scale_bytes = block_scale.contiguous().view(torch.uint8)
    arguments = (codes.contiguous(), scale_bytes, global_scale.contiguous(), out)
    _launch(kernels.dequantize_kernel, arguments, out.shape, num_warps=1)


def unpack_shards(shards: Tensor, layout: ShardLayout, global_scale: Tensor, out: Tensor) -> None:
    """As `reference.unpack_shards`."""
    if not out.numel():
        return
    per_shard = layout.num_rows if global_scale.ndim else 0
    num_pieces = len(out) if per_shard else shards.numel() // layout.num_bytes
    piece_blocks = layout.num_blocks // max(per_shard, 1)
    num_blocks = out.numel() // BLOCK_SIZE
    even = piece_blocks % TILE_BLOCKS == 0 and num_blocks == num_pieces * piece_blocks
    grid = (triton.cdiv(piece_blocks, TILE_BLOCKS), num_pieces)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        kernels.unpack_shards_kernel[grid](
            shards,
            global_scale,
            out,
            layout.num_bytes,
            layout.num_blocks,
            per_shard,
            num_blocks,
            EVEN=even,
            TILE=TILE_BLOCKS,
            num_warps=1,
            enable_fp_fusion=False,
        )


def _launch(
    kernel: "triton.JITFunction",
    arguments: tuple[Tensor, ...],
    shape: torch.Size,
    num_warps: int,
    **options: str,
) -> None:
    """One program for each TILE_BLOCKS blocks of each matrix of `shape` (..., N, K)."""
    matrices, matrix_blocks = prod(shape[:-2]), prod(shape[-2:]) // BLOCK_SIZE
    if not matrices * matrix_blocks:
        return
    even = matrix_blocks % TILE_BLOCKS == 0
    grid = (triton.cdiv(matrix_blocks, TILE_BLOCKS), matrices)
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        kernel[grid](
            *arguments,
            matrix_blocks,
            **options,
            EVEN=even,
            TILE=TILE_BLOCKS,
            num_warps=num_warps,
            enable_fp_fusion=False,
        )
