"""Runs a Triton kernel once for many matrices of a size, wherever they lie, by their addresses."""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat_core.nvfp4 import kernels_many, reference
from qat_core.nvfp4.format import BLOCK_BYTES, CODE_BYTES, ShardLayout
from qat_core.nvfp4.repeated_kernel import RepeatedKernel
from qat_core.options import BLOCK_SIZE, BlockScaleMethod, ScalePolicy

# Four warps take a block of the tile a thread, one warp four blocks: on an H200 the faster way to
# pack and unpack, the slower one to fake-quantize and, as registers run out, to search scales.
TILE_BLOCKS, TILE_WARPS = 128, 4
WIDE_TILE_BLOCKS = 512  # four blocks a thread of four warps
AMAX_TILE_BLOCKS, AMAX_WARPS = 1024, 8
# One warp has the maximum of its two blocks a thread without shared memory, and no barrier.
MEASURED_TILE_BLOCKS, MEASURED_WARPS = 64, 1
# What rounds again looks at more blocks a program: most find nothing to do, and cost their start.
AGAIN_TILE_BLOCKS = 1024
AMAX = RepeatedKernel(kernels_many.amax_kernel)
MEASURE_AND_ROUND = RepeatedKernel(kernels_many.measure_and_round_kernel)
ROUND_AGAIN = RepeatedKernel(kernels_many.round_again_kernel)
QUANTIZE_ALL = RepeatedKernel(kernels_many.quantize_all_kernel)
TL_DTYPE = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
# Numbers of a weight's first matrix, each with its step to the next matrix.
Columns = tuple[tuple[int, int], ...]


class Kind(NamedTuple):
    """Matrices of one dtype and size."""

    dtype: torch.dtype
    matrix_blocks: int
    table: tuple[Tensor, ...]


def quantize_all(
    weights: Sequence[Tensor], global_scales: Sequence[Tensor], method: BlockScaleMethod
) -> list[tuple[Tensor, Tensor]]:
    """As `quantize` of each weight, in few launches; the results share memory."""
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
    """As `reference.pack_shards`, in few launches; the results share memory.

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
    """As `reference.group_amax`, in few launches."""
    # Kept until the kernels are queued: the tables hold addresses, not tensors.
    weights = [aligned(w) for members in groups for w in members]
    slots, bits = _slots(groups)
    for kind in _by_kind(weights, [(slot,) for slot in slots]):
        _launch(AMAX, kind, (bits,), AMAX_TILE_BLOCKS, AMAX_WARPS)
    return _of_groups(groups, bits.view(torch.float32))


def measure_and_round(
    groups: Sequence[Sequence[Tensor]],
    last_scales: Sequence[Tensor],
    policy: ScalePolicy,
    method: BlockScaleMethod,
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """As `reference.measure_and_round`; the results share memory.

    Weights are rounded with their last scales while they are measured, and once more, in launches
    that read nothing else, where a scale is new. Nothing waits for the GPU.
    """
    weights = [aligned(w) for members in groups for w in members]  # kept as in `group_amax`
    slots, bits = _slots(groups)
    sizes = [w.nbytes for w in weights]
    out = bits.new_empty(sum(sizes), dtype=torch.uint8)
    places = accumulate(sizes, initial=0)
    columns = [
        (slot, (place, prod(w.shape[-2:]) * w.element_size()))
        for slot, place, w in zip(slots, places, weights, strict=False)
    ]
    kinds = _by_kind(weights, columns)
    before = torch.cat([scale.reshape(-1) for scale in last_scales])
    tile, warps = MEASURED_TILE_BLOCKS, MEASURED_WARPS
    for kind in kinds:
        _, slot, _ = kind.table
        parts = bits.new_empty(len(slot), triton.cdiv(kind.matrix_blocks, tile))
        _launch(MEASURE_AND_ROUND, kind, (before, parts, out), tile, warps, method)
        bits.scatter_reduce_(0, slot, parts.amax(1), "amax")
    amax = bits.view(torch.float32)
    after = reference.global_scale(amax, policy)
    for kind in kinds:
        _launch(ROUND_AGAIN, kind, (before, after, out), AGAIN_TILE_BLOCKS, warps, method, tile)
    pieces = iter(torch.split(out, sizes))
    rounded = [[next(pieces).view(w.dtype).view(w.shape) for w in members] for members in groups]
    return _of_groups(groups, amax), rounded


def _slots(groups: Sequence[Sequence[Tensor]]) -> tuple[list[tuple[int, int]], Tensor]:
    """Of each weight where its first matrix's maximum is, with the step to the next; zeros."""
    sizes = [prod(members[0].shape[:-2]) for members in groups]
    firsts = accumulate(sizes, initial=0)
    slots = [(first, 1) for first, members in zip(firsts, groups, strict=False) for _ in members]
    return slots, groups[0][0].new_zeros(sum(sizes), dtype=torch.int32)


def _of_groups(groups: Sequence[Sequence[Tensor]], flat: Tensor) -> list[Tensor]:
    """A value a matrix, in the shape of each group's leading dimensions."""
    leads = [members[0].shape[:-2] for members in groups]
    parts = torch.split(flat, [prod(lead) for lead in leads])
    return [part.view(lead) for part, lead in zip(parts, leads, strict=True)]


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
    for kind in _by_kind(weights, columns):
        _launch(QUANTIZE_ALL, kind, (out,), tile, TILE_WARPS, method)


def _by_kind(weights: Sequence[Tensor], columns: Sequence[Columns]) -> list[Kind]:
    """The weights' matrices by dtype and size, of which a model has few: a launch is for one kind.

    A kind's table has the address of each matrix and its `columns`.
    """
    where = tuple((w.data_ptr(), w.shape, w.dtype) for w in weights)
    return _kinds(where, tuple(columns), weights[0].device)


@lru_cache(maxsize=64)  # made once, as parameters keep their addresses
def _kinds(
    weights: tuple[tuple[int, torch.Size, torch.dtype], ...],
    columns: tuple[Columns, ...],
    device: torch.device,
) -> list[Kind]:
    """The largest first: meanwhile the CPU launches the others."""
    kinds = defaultdict(list)
    for (address, shape, dtype), own in zip(weights, columns, strict=True):
        num_matrices, matrix_size = prod(shape[:-2]), prod(shape[-2:])
        if num_matrices * matrix_size:
            row = (address, matrix_size * dtype.itemsize), *own
            kinds[dtype, matrix_size // BLOCK_SIZE].append((num_matrices, row))
    found = [Kind(*kind, _table(rows, device)) for kind, rows in kinds.items()]
    return sorted(found, key=lambda kind: -kind.matrix_blocks * len(kind.table[0]))


def _launch(
    kernel: RepeatedKernel,
    kind: Kind,
    tensors: tuple[Tensor, ...],
    tile: int,
    num_warps: int,
    *options: str | int,
) -> None:
    """One program for each `tile` blocks of each matrix; the kernel gets table and `tensors`."""
    dtype, matrix_blocks, table = kind
    grid = (triton.cdiv(matrix_blocks, tile), len(table[0]), 1)
    constants = *options, TL_DTYPE[dtype], matrix_blocks % tile == 0, tile
    kernel.launch(grid, (*table, *tensors), (matrix_blocks,), constants, num_warps)


def _table(rows: Sequence[tuple[int, Columns]], device: torch.device) -> tuple[Tensor, ...]:
    """Columns of the table on the device.

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


def _matrix_blocks(w: Tensor) -> int:
    return prod(w.shape[-2:]) // BLOCK_SIZE


def aligned(w: Tensor) -> Tensor:
    """Contiguous, at a multiple of the 16 bytes that one thread loads."""
    w = w.contiguous()
    return w.clone() if w.data_ptr() % 16 else w
