"""Triton kernels of the codec for one weight; `reference.py` is their specification, bit for bit.

The grid is (tiles of a matrix, matrices), which makes the global scale one scalar a program.
Launches turn FP fusion off: the only fused multiply-adds are those written in `blocks.py` and
`rounding.py`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from qat_core.nvfp4.blocks import pack_blocks, round_blocks, tile_of, unpack_blocks


@triton.jit
def fake_quantize_kernel(
    w_ptr,
    global_ptr,
    out_ptr,
    matrix_blocks,
    METHOD: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """bf16(e2m1(w / step) * step) of BF16 or FP32 `w`, with step = scale / global scale."""
    first = _first_block(matrix_blocks)
    block, inside = tile_of(tl.program_id(0), matrix_blocks, EVEN, TILE)
    global_scale = tl.load(global_ptr + tl.program_id(1))
    w_ptr, out_ptr = w_ptr + first * 16, out_ptr + first * 16
    round_blocks(w_ptr, global_scale, out_ptr, block, inside, METHOD, TILE)


@triton.jit
def quantize_kernel(
    w_ptr,
    global_ptr,
    codes_ptr,
    scale_ptr,
    matrix_blocks,
    METHOD: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """8 bytes of codes and 1 byte of scale a block."""
    first = _first_block(matrix_blocks)
    block, inside = tile_of(tl.program_id(0), matrix_blocks, EVEN, TILE)
    global_scale = tl.load(global_ptr + tl.program_id(1))
    w_ptr, codes_ptr, scale_ptr = w_ptr + first * 16, codes_ptr + first * 8, scale_ptr + first
    pack_blocks(w_ptr, global_scale, codes_ptr, scale_ptr, block, inside, METHOD, TILE)


@triton.jit
def dequantize_kernel(
    codes_ptr, scale_ptr, global_ptr, out_ptr, matrix_blocks, EVEN: tl.constexpr, TILE: tl.constexpr
):
    """code * (scale / global scale) in the output's dtype."""
    first = _first_block(matrix_blocks)
    block, inside = tile_of(tl.program_id(0), matrix_blocks, EVEN, TILE)
    global_scale = tl.load(global_ptr + tl.program_id(1))
    value = unpack_blocks(
        codes_ptr + first * 8, scale_ptr + first, global_scale, block, inside, TILE
    )
    out = out_ptr + first * 16 + block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def unpack_shards_kernel(
    shards_ptr,
    global_ptr,
    out_ptr,
    shard_bytes,
    shard_blocks,
    matrices_per_shard,
    num_blocks,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """bf16(code * (scale / global scale)) in the output's dtype, from the shards of a weight.

    The grid is (tiles of a piece, pieces). A shard of experts is `matrices_per_shard` pieces, each
    with a global scale of its own; one of a matrix's rows (0) is one piece.
    """
    piece = tl.program_id(1).to(tl.int64)
    per_shard = tl.maximum(matrices_per_shard, 1)
    piece_blocks = shard_blocks // per_shard
    shard_ptr = shards_ptr + piece // per_shard * shard_bytes
    first_in_shard = piece % per_shard * piece_blocks
    codes_ptr = shard_ptr + first_in_shard * 8
    scale_ptr = shard_ptr + shard_blocks * 8 + first_in_shard
    first = piece * piece_blocks
    num_inside = tl.minimum(piece_blocks, num_blocks - first)
    block, inside = tile_of(tl.program_id(0), num_inside, EVEN, TILE)
    global_scale = tl.load(global_ptr + tl.where(matrices_per_shard > 0, piece, 0))
    value = unpack_blocks(codes_ptr, scale_ptr, global_scale, block, inside, TILE).to(tl.bfloat16)
    out = out_ptr + first * 16 + block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _first_block(matrix_blocks):
    """Of this program's matrix, int64."""
    return tl.program_id(1).to(tl.int64) * matrix_blocks
