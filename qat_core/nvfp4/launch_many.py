"""Runs a Triton kernel once for many weights, wherever they lie: a table holds their addresses."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat_core.nvfp4 import kernels
from qat_core.nvfp4.format import BLOCK_BYTES, CODE_BYTES, ShardLayout
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


def quantize_all(
    weights: Sequence[Tensor], global_scales: Sequence[Tensor], method: BlockScaleMethod
) -> list[tuple[Tensor, Tensor]]:
    """As `quantize` of each weight, in one launch for each dtype; the results share memory."""
    sizes = [w.numel() // BLOCK_SIZE for w in weights]
    out = weights[0].new_empty(sum(sizes) * BLOCK_BYTES, dtype=torch.uint8)
    codes, scale = torch.split(out, [sum(sizes) * CODE_BYTES, sum(sizes)])
    places = [
        (first * CODE_BYTES, codes.numel() + first)
        for first in list(accumulate(sizes, initial=0))[:-1]
    ]
    _quantize_into(out, places, weights, global_scales, method)
    codes, scale = codes.view(-1, CODE_BYTES), scale.view(torch.float8_e4m3fn)
    return [
        (
            own_codes.view(*w.shape[:-1], w.shape[-1] // 2),
            own_scale.view(*w.shape[:-1], w.shape[-1] // BLOCK_SIZE),
        )
        for w, own_codes, own_scale in zip(
            weights, torch.split(codes, sizes), torch.split(scale, sizes), strict=True
        )
    ]


def pack_shards(
    weights: Sequence[Tensor],
    global_scales: Sequence[Tensor],
    layouts: Sequence[ShardLayout],
    method: BlockScaleMethod,
) -> list[Tensor]:
    """As `reference.pack_shards`, in one launch for each dtype; the results share memory.

    Bytes of padding are whatever lay there: nobody reads them.
    """
    sizes = [layout.num_bytes for layout in layouts]
    out = weights[0].new_empty(sum(sizes), dtype=torch.uint8)
    firsts = list(accumulate(sizes, initial=0))[:-1]
    places = [
        (first, first + layout.num_blocks * CODE_BYTES)
        for first, layout in zip(firsts, layouts, strict=True)
    ]
    _quantize_into(out, places, weights, global_scales, method)
    return list(torch.split(out, sizes))


def group_amax(groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """As `reference.group_amax`, in one launch for each dtype among the weights."""
    leads = [members[0].shape[:-2] for members in groups]
    sizes = [prod(lead) for lead in leads]
    # Kept until the kernels are queued: the tables hold addresses, not tensors.
    weights = [aligned(w) for members in groups for w in members]
    slots = accumulate(sizes, initial=0)
    columns = [((slot, 1),) for slot, members in zip(slots, groups, strict=False) for _ in members]
    bits = torch.zeros(sum(sizes), dtype=torch.int32, device=weights[0].device)
    _launch_all(kernels.amax_kernel, weights, columns, bits, AMAX_TILE_BLOCKS, AMAX_WARPS)
    amax = torch.split(bits.view(torch.float32), sizes)
    return [values.view(lead) for values, lead in zip(amax, leads, strict=True)]


def _quantize_into(
    out: Tensor,
    places: Sequence[tuple[int, int]],
    weights: Sequence[Tensor],
    global_scales: Sequence[Tensor],
    method: BlockScaleMethod,
) -> None:
    """Write each weight's codes and block scales to its places, bytes of `out`."""
    # Kept until the kernels are queued: the tables hold addresses, not tensors.
    weights = [aligned(w) for w in weights]
    global_scales = [scale.contiguous() for scale in global_scales]
    columns = [
        (
            (scale.data_ptr(), 4),
            (code_byte, _matrix_blocks(w) * CODE_BYTES),
            (scale_byte, _matrix_blocks(w)),
        )
        for w, scale, (code_byte, scale_byte) in zip(weights, global_scales, places, strict=True)
    ]
    tile = WIDE_TILE_BLOCKS if method == "max" else TILE_BLOCKS
    kernel = kernels.quantize_all_kernel
    _launch_all(kernel, weights, columns, out, tile, TILE_WARPS, METHOD=method)


def _launch_all(
    kernel: "triton.JITFunction",
    weights: Sequence[Tensor],
    columns: Sequence[Columns],
    out: Tensor,
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
            table = _table(rows, out.device)
            most_blocks = max(columns[1][0] for _, columns in rows)
            grid = (triton.cdiv(most_blocks, tile), len(table[0]))
            with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
                kernel[grid](
                    *table,
                    out,
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


def aligned(w: Tensor) -> Tensor:
    """Contiguous, at a multiple of the 16 bytes that one thread loads."""
    w = w.contiguous()
    return w.clone() if w.data_ptr() % 16 else w
