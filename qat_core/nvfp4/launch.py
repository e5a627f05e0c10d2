"""Runs the Triton kernels; the same functions as `reference.py`, for CUDA tensors.

Imported only when a CUDA tensor arrives: a CPU does not need Triton.
"""

from functools import lru_cache
from math import prod
from typing import Any

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
    measure_and_round,
    pack_shards,
    quantize_all,
)
from qat_core.nvfp4.repeated_kernel import Grid, RepeatedKernel
from qat_core.options import BLOCK_SIZE, BlockScaleMethod

__all__ = [
    "dequantize",
    "dequantize_into",
    "fake_quantize",
    "group_amax",
    "measure_and_round",
    "pack_shards",
    "quantize",
    "quantize_all",
    "unpack_shards",
]

FAKE_QUANTIZE = RepeatedKernel(kernels.fake_quantize_kernel)
QUANTIZE = RepeatedKernel(kernels.quantize_kernel)
DEQUANTIZE = RepeatedKernel(kernels.dequantize_kernel)
UNPACK_SHARDS = RepeatedKernel(kernels.unpack_shards_kernel)


def fake_quantize(w: Tensor, global_scale: Tensor, method: BlockScaleMethod) -> Tensor:
    """As `reference.fake_quantize`."""
    w = aligned(w)
    out = torch.empty_like(w, dtype=torch.bfloat16)
    _launch(FAKE_QUANTIZE, (w, global_scale.contiguous(), out), w.shape, TILE_WARPS, method)
    return out


def quantize(w: Tensor, global_scale: Tensor, method: BlockScaleMethod) -> tuple[Tensor, Tensor]:
    """As `reference.quantize`."""
    w = aligned(w)
    *lead, columns = w.shape
    codes = torch.empty((*lead, columns // 2), dtype=torch.uint8, device=w.device)
    scale = torch.empty((*lead, columns // BLOCK_SIZE), dtype=torch.uint8, device=w.device)
    num_warps = 1 if method == "max" else TILE_WARPS
    tensors = (w, global_scale.contiguous(), codes, scale)
    _launch(QUANTIZE, tensors, w.shape, num_warps, method)
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
    tensors = (codes.contiguous(), scale_bytes, global_scale.contiguous(), out)
    _launch(DEQUANTIZE, tensors, out.shape, 1)


def unpack_shards(shards: Tensor, layout: ShardLayout, global_scale: Tensor, out: Tensor) -> None:
    """As `reference.unpack_shards`."""
    if not out.numel():
        return
    grid, numbers, is_even = _pieces(layout, out.shape, len(shards), global_scale.ndim)
    tensors = (shards, global_scale, out)
    UNPACK_SHARDS.launch(grid, tensors, numbers, (is_even, TILE_BLOCKS), num_warps=1)


def _launch(
    kernel: RepeatedKernel,
    tensors: tuple[Tensor, ...],
    shape: torch.Size,
    num_warps: int,
    *constants: Any,
) -> None:
    """One program for each TILE_BLOCKS blocks of each matrix of `shape` (..., N, K)."""
    grid, matrix_blocks, is_even = _tiles(shape)
    kernel.launch(grid, tensors, (matrix_blocks,), (*constants, is_even, TILE_BLOCKS), num_warps)


@lru_cache(maxsize=4096)  # a model has few shapes
def _tiles(shape: torch.Size) -> tuple[Grid, int, bool]:
    """The grid, blocks of a matrix, and whether tiles are whole."""
    matrix_blocks = prod(shape[-2:]) // BLOCK_SIZE
    grid = (triton.cdiv(matrix_blocks, TILE_BLOCKS), prod(shape[:-2]), 1)
    return grid, matrix_blocks, matrix_blocks % TILE_BLOCKS == 0


@lru_cache(maxsize=4096)
def _pieces(
    layout: ShardLayout, shape: torch.Size, num_bytes: int, num_expert_dims: int
) -> tuple[Grid, tuple[int, ...], bool]:
    """Of all shards of a weight: the grid, the numbers of its kernel, and whether tiles are whole.

    A piece is a shard of a matrix's rows, or an expert.
    """
    num_blocks = prod(shape) // BLOCK_SIZE
    per_shard = layout.num_rows if num_expert_dims else 0
    num_pieces = shape[0] if per_shard else num_bytes // layout.num_bytes
    piece_blocks = layout.num_blocks // max(per_shard, 1)
    grid = (triton.cdiv(piece_blocks, TILE_BLOCKS), num_pieces, 1)
    is_even = piece_blocks % TILE_BLOCKS == 0 and num_blocks == num_pieces * piece_blocks
    return grid, (layout.num_bytes, layout.num_blocks, per_shard, num_blocks), is_even
