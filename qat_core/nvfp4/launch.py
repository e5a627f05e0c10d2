"""Runs the Triton kernels; the same functions as `reference.py`, for CUDA tensors.

Imported only when a CUDA tensor arrives: a CPU does not need Triton.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat_core.nvfp4 import kernels
from qat_core.options import BLOCK_SIZE, BlockScaleMethod

# Four warps take a block of the tile a thread, one warp four blocks: on an H200 the faster way to
# pack and unpack, the slower one to fake-quantize and, as registers run out, to search scales.
TILE_BLOCKS, TILE_WARPS = 128, 4
# Four blocks a thread of four warps: `quantize_all` runs as many programs for each matrix as the
# largest needs, so that large tiles spare idle ones.
WIDE_TILE_BLOCKS = 512
AMAX_TILE_BLOCKS, AMAX_WARPS = 1024, 8
TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
# Numbers of a weight's first matrix, each with its step to the next matrix.
Columns = tuple[tuple[int, int], ...]


def fake_quantize(w: Tensor, global_scale: Tensor, method: BlockScaleMethod) -> Tensor:
    """As `reference.fake_quantize`."""
    w = _aligned(w)
    out = torch.empty(w.shape, dtype=torch.bfloat16, device=w.device)
    arguments = (w, global_scale.contiguous(), out)
    kernel = kernels.fake_quantize_kernel
    _launch(kernel, arguments, w.shape, TILE_WARPS, METHOD=method)
    return out


def quantize(w: Tensor, global_scale: Tensor, method: BlockScaleMethod) -> tuple[Tensor, Tensor]:
    """As `reference.quantize`."""
    w = _aligned(w)
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


def quantize_all(
    weights: Sequence[Tensor], global_scales: Sequence[Tensor], method: BlockScaleMethod
) -> list[tuple[Tensor, Tensor]]:
    """As `quantize` of each weight, in one launch for each dtype; the results share memory."""
    # Kept until the kernels are queued: the tables hold addresses, not tensors.
    weights = [_aligned(w) for w in weights]
    global_scales = [scale.contiguous() for scale in global_scales]
    sizes = [w.numel() // BLOCK_SIZE for w in weights]
    codes = weights[0].new_empty((sum(sizes), BLOCK_SIZE // 2), dtype=torch.uint8)
    scale = weights[0].new_empty(sum(sizes), dtype=torch.uint8)
    firsts = accumulate(sizes, initial=0)
    columns = [
        ((global_scale.data_ptr(), 4), (first, _matrix_blocks(w)))
        for w, global_scale, first in zip(weights, global_scales, firsts, strict=False)
    ]
    tile = WIDE_TILE_BLOCKS if method == "max" else TILE_BLOCKS
    kernel = kernels.quantize_all_kernel
    outputs = (codes, scale)
    _launch_all(kernel, weights, columns, outputs, tile, TILE_WARPS, METHOD=method)
    scale = scale.view(torch.float8_e4m3fn)
    return [
        (
            own_codes.view(*w.shape[:-1], w.shape[-1] // 2),
            own_scale.view(*w.shape[:-1], w.shape[-1] // BLOCK_SIZE),
        )
        for w, own_codes, own_scale in zip(
            weights, torch.split(codes, sizes), torch.split(scale, sizes), strict=True
        )
    ]


def group_amax(groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """As `reference.group_amax`, in one launch for each dtype among the weights."""
    leads = [members[0].shape[:-2] for members in groups]
    sizes = [prod(lead) for lead in leads]
    # Kept until the kernels are queued: the tables hold addresses, not tensors.
    weights = [_aligned(w) for members in groups for w in members]
    slots = accumulate(sizes, initial=0)
    columns = [((slot, 1),) for slot, members in zip(slots, groups, strict=False) for _ in members]
    bits = torch.zeros(sum(sizes), dtype=torch.int32, device=weights[0].device)
    _launch_all(kernels.amax_kernel, weights, columns, (bits,), AMAX_TILE_BLOCKS, AMAX_WARPS)
    amax = torch.split(bits.view(torch.float32), sizes)
    return [values.view(lead) for values, lead in zip(amax, leads, strict=True)]


def _launch_all(
    kernel: "triton.JITFunction",
    weights: Sequence[Tensor],
    columns: Sequence[Columns],
    outputs: tuple[Tensor, ...],
    tile: int,
    num_warps: int,
    **options: str,
) -> None:
    """One launch for each dtype: one program for each `tile` blocks of each matrix.

    The kernel gets a table: address and number of blocks of each matrix, and its `columns`.
    """
    for dtype, tl_dtype in TL_DTYPE.items():
        rows = tuple(
            (prod(w.shape[:-2]), (_addresses(w), (_matrix_blocks(w), 0), *own))
            for w, own in zip(weights, columns, strict=True)
            if w.dtype == dtype and w.numel()
        )
        if rows:
            table = _table(rows, outputs[0].device)
            most_blocks = max(columns[1][0] for _, columns in rows)
            grid = (triton.cdiv(most_blocks, tile), len(table[0]))
            with torch.cuda.device_of(outputs[0]):  # type: ignore[no-untyped-call]
                kernel[grid](
                    *table,
                    *outputs,
                    **options,
                    DTYPE=tl_dtype,
                    TILE=tile,
                    num_warps=num_warps,
                    enable_fp_fusion=False,
                )


@lru_cache(maxsize=16)
def _table(rows: tuple[tuple[int, Columns], ...], device: torch.device) -> tuple[Tensor, ...]:
    """Columns of the table on the device: made once, as parameters keep their addresses.

    From pinned memory, so that nothing waits for the device where addresses do change.
    """
    matrices = [
        [start + i * step for start, step in columns]
        for num_matrices, columns in rows
        for i in range(num_matrices)
    ]
    return tuple(
        torch.tensor(column, device="cpu", pin_memory=device.type == "cuda").to(
            device, non_blocking=True
        )
        for column in zip(*matrices, strict=True)
    )


def _addresses(w: Tensor) -> tuple[int, int]:
    return w.data_ptr(), _matrix_blocks(w) * BLOCK_SIZE * w.element_size()


def _matrix_blocks(w: Tensor) -> int:
    return prod(w.shape[-2:]) // BLOCK_SIZE


def _aligned(w: Tensor) -> Tensor:
    """Contiguous, at a multiple of the 16 bytes that one thread loads."""
    w = w.contiguous()
    return w.clone() if w.data_ptr() % 16 else w


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
