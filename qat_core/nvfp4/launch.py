"""Runs the Triton kernels; the same functions as `reference.py`, for CUDA tensors.

Imported only when a CUDA tensor arrives: Triton is no requirement on a CPU.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat_core.nvfp4 import kernels
from qat_core.nvfp4.format import BLOCK_SIZE, BlockScale

TILE_BLOCKS = 256
AMAX_TILE = 16384
TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
# Rows of an amax table: address, numel and slot of each matrix.
Matrices = tuple[tuple[int, int, int], ...]


def fake_quantize(w: Tensor, global_scale: Tensor, block_scale: BlockScale) -> Tensor:
    """As `reference.fake_quantize`."""
    w = w.contiguous()
    out = torch.empty(w.shape, dtype=torch.bfloat16, device=w.device)
    arguments = (w, global_scale.contiguous(), out)
    _launch(kernels.fake_quantize_kernel, arguments, w.shape, BLOCK_SCALE=block_scale)
    return out


def quantize(w: Tensor, global_scale: Tensor, block_scale: BlockScale) -> tuple[Tensor, Tensor]:
    """As `reference.quantize`."""
    w = w.contiguous()
    *lead, columns = w.shape
    codes = torch.empty((*lead, columns // 2), dtype=torch.uint8, device=w.device)
    scale = torch.empty((*lead, columns // BLOCK_SIZE), dtype=torch.uint8, device=w.device)
    arguments = (w, global_scale.contiguous(), codes, scale)
    _launch(kernels.quantize_kernel, arguments, w.shape, BLOCK_SCALE=block_scale)
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
    _launch(kernels.dequantize_kernel, arguments, out.shape)


def group_amax(groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """As `reference.group_amax`, in one launch for each dtype among the weights."""
    leads = [members[0].shape[:-2] for members in groups]
    sizes = [prod(lead) for lead in leads]
    # Kept until the kernels are queued: the table holds addresses, not tensors.
    weights = [[_aligned(w) for w in members] for members in groups]
    device = weights[0][0].device
    bits = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
    for dtype, tl_dtype in TL_DTYPE.items():
        if matrices := _matrices(weights, sizes, dtype):
            table = _table(matrices, device)
            grid = (triton.cdiv(max(numel for _, numel, _ in matrices), AMAX_TILE), len(matrices))
            with torch.cuda.device_of(bits):  # type: ignore[no-untyped-call]
                kernels.amax_kernel[grid](*table, bits, DTYPE=tl_dtype, TILE=AMAX_TILE)
    amax = torch.split(bits.view(torch.float32), sizes)
    return [values.view(lead) for values, lead in zip(amax, leads, strict=True)]


def _matrices(weights: list[list[Tensor]], sizes: list[int], dtype: torch.dtype) -> Matrices:
    """The non-empty matrices of one dtype, the leading dimensions taken apart."""
    rows, slot = [], 0
    for members, size in zip(weights, sizes, strict=True):
        for w in members:
            numel = prod(w.shape[-2:])
            if w.dtype == dtype and numel:
                stride = numel * w.element_size()
                rows += [(w.data_ptr() + i * stride, numel, slot + i) for i in range(size)]
        slot += size
    return tuple(rows)


@lru_cache(maxsize=16)
def _table(matrices: Matrices, device: torch.device) -> tuple[Tensor, ...]:
    """Columns of the table on the device: made once, as parameters keep their addresses."""
    return tuple(torch.tensor(column, device=device) for column in zip(*matrices, strict=True))


def _aligned(w: Tensor) -> Tensor:
    """Contiguous, at a multiple of the 16 bytes that one thread loads."""
    w = w.contiguous()
    return w.clone() if w.data_ptr() % 16 else w


def _launch(
    kernel: "triton.JITFunction", arguments: tuple[Tensor, ...], shape: torch.Size, **options: str
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
            enable_fp_fusion=False,
        )
