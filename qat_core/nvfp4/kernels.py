"""Triton kernels of the codec; `reference.py` is their specification, bit for bit.

A tile holds TILE blocks. The grid is (tiles of a matrix, matrices), which makes the global scale
one scalar a program. Weights are read as (TILE, 2, 4) words of two BF16: Triton then gives a thread
whole blocks, 16 bytes a load, so that a block's scale is computed once and shuffles nothing.
Launches turn FP fusion off: the only fused multiply-adds are those written here.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from qat_core.nvfp4.rounding import (
    code_words,
    e4m3_to_fp32,
    round_to_e2m1,
    scale_of_blocks,
    step_of,
)


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
    first, block, inside = _tile(matrix_blocks, EVEN, TILE)
    even, odd = _load_pairs(w_ptr + first * 16, block, inside, TILE)
    global_scale = tl.load(global_ptr + tl.program_id(1))
    scale = scale_of_blocks(even, odd, global_scale, METHOD, TILE)
    step = step_of(scale, global_scale)[:, None, None]
    even, odd = round_to_e2m1(even, step) * step, round_to_e2m1(odd, step) * step
    value = tl.reshape(tl.join(even, odd), (TILE, 2, 8)).to(tl.bfloat16)
    tl.store(out_ptr + first * 16 + _elements(block), value, mask=inside[:, None, None])


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
    first, block, inside = _tile(matrix_blocks, EVEN, TILE)
    global_scale = tl.load(global_ptr + tl.program_id(1))
    w_ptr, codes_ptr, scale_ptr = w_ptr + first * 16, codes_ptr + first * 8, scale_ptr + first
    _pack(w_ptr, global_scale, codes_ptr, scale_ptr, block, inside, METHOD, TILE)


@triton.jit
def quantize_all_kernel(
    address_ptr,
    blocks_ptr,
    global_address_ptr,
    codes_byte_ptr,
    scale_byte_ptr,
    out_ptr,
    METHOD: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """As `quantize_kernel`, for matrices anywhere in memory: a table has one row for each.

    Its columns: address, number of blocks, address of the global scale, and at which bytes of `out`
    the codes and the block scales begin, the codes at a multiple of 8.
    """
    matrix = tl.program_id(1)
    matrix_blocks = tl.load(blocks_ptr + matrix)
    start = tl.program_id(0).to(tl.int64) * TILE
    if start < matrix_blocks:
        w_ptr = tl.load(address_ptr + matrix).to(tl.pointer_type(DTYPE))
        w_ptr = tl.multiple_of(w_ptr, 16)
        global_ptr = tl.load(global_address_ptr + matrix).to(tl.pointer_type(tl.float32))
        codes_ptr = out_ptr + tl.multiple_of(tl.load(codes_byte_ptr + matrix), 8)
        scale_ptr = out_ptr + tl.load(scale_byte_ptr + matrix)
        block = start + tl.arange(0, TILE)
        inside = block < matrix_blocks
        _pack(w_ptr, tl.load(global_ptr), codes_ptr, scale_ptr, block, inside, METHOD, TILE)


@triton.jit
def dequantize_kernel(
    codes_ptr, scale_ptr, global_ptr, out_ptr, matrix_blocks, EVEN: tl.constexpr, TILE: tl.constexpr
):
    """code * (scale / global scale) in the output's dtype."""
    first, block, inside = _tile(matrix_blocks, EVEN, TILE)
    global_scale = tl.load(global_ptr + tl.program_id(1))
    value = _unpack(codes_ptr + first * 8, scale_ptr + first, global_scale, block, inside, TILE)
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
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = block < tl.minimum(piece_blocks, num_blocks - first)
    if EVEN:
        inside = tl.full((TILE,), True, tl.int1)
    global_scale = tl.load(global_ptr + tl.where(matrices_per_shard > 0, piece, 0))
    value = _unpack(codes_ptr, scale_ptr, global_scale, block, inside, TILE).to(tl.bfloat16)
    out = out_ptr + first * 16 + block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def amax_kernel(
    address_ptr, blocks_ptr, slot_ptr, out_ptr, DTYPE: tl.constexpr, TILE: tl.constexpr
):
    """Raise out[slot], the bits of an FP32 maximum, to each matrix's largest |bf16(w)|.

    Reads words of one FP32 or two BF16 weights. As integers the bits of non-negative floats keep
    their order, and NaN stays the largest; rounding keeps it too, so only the maximum is rounded.
    Words counted in whole blocks let the compiler see that the mask spares 16-byte loads.
    """
    BLOCK_WORDS: tl.constexpr = DTYPE.primitive_bitwidth // 2
    matrix = tl.program_id(1)
    num_words = tl.load(blocks_ptr + matrix) * BLOCK_WORDS
    start = tl.program_id(0).to(tl.int64) * (TILE * BLOCK_WORDS)
    if start < num_words:
        w_ptr = tl.load(address_ptr + matrix).to(tl.pointer_type(tl.int32))
        w_ptr = tl.multiple_of(w_ptr, 16)
        word = start + tl.arange(0, TILE * BLOCK_WORDS)
        words = tl.load(w_ptr + word, mask=word < num_words, other=0)
        if BLOCK_WORDS == 8:
            bits = tl.max(tl.maximum(words & 0x7FFF0000, (words << 16) & 0x7FFF0000), axis=0)
        else:
            amax = tl.max(words & 0x7FFFFFFF, axis=0).to(tl.float32, bitcast=True)
            bits = amax.to(tl.bfloat16).to(tl.float32).to(tl.int32, bitcast=True)
        tl.atomic_max(out_ptr + tl.load(slot_ptr + matrix), bits)


@triton.jit
def _pack(
    w_ptr,
    global_scale,
    codes_ptr,
    scale_ptr,
    block,
    inside,
    METHOD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Codes and scales of the blocks `block` (TILE,) of one matrix."""
    even, odd = _load_pairs(w_ptr, block, inside, TILE)
    scale = scale_of_blocks(even, odd, global_scale, METHOD, TILE)
    step = step_of(scale, global_scale)[:, None, None]
    words = code_words(even, odd, step, TILE)
    word = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(codes_ptr.to(tl.pointer_type(tl.int32)) + word, words, mask=inside[:, None])
    scale_byte = (scale.to(tl.int32, bitcast=True) >> 20) - ((127 - 7) << 3)
    scale_byte = tl.where(scale == scale, scale_byte, 0x7F)
    tl.store(scale_ptr + block, scale_byte.to(tl.uint8), mask=inside)


@triton.jit
def _unpack(codes_ptr, scale_ptr, global_scale, block, inside, TILE: tl.constexpr):
    """FP32 values (TILE, 16) of the blocks `block` (TILE,) of one matrix."""
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    pair = tl.load(codes_ptr + byte, mask=inside[:, None], other=0).to(tl.int32)
    scale_byte = tl.load(scale_ptr + block[:, None], mask=inside[:, None], other=8)
    step = step_of(e4m3_to_fp32(scale_byte), global_scale)
    code = tl.reshape(tl.join(pair & 0xF, pair >> 4), (TILE, 16))
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return tl.fma(bits.to(tl.float32, bitcast=True) * 8.507059173023462e37, step, 0.0)


@triton.jit
def _tile(matrix_blocks, EVEN: tl.constexpr, TILE: tl.constexpr):
    """First block of this program's matrix (int64), its block indices, and which are inside.

    Where all are (EVEN) the compiler drops the masks.
    """
    first = tl.program_id(1).to(tl.int64) * matrix_blocks
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = block < matrix_blocks
    if EVEN:
        inside = tl.full((TILE,), True, tl.int1)
    return first, block, inside


@triton.jit
def _elements(block):
    """Indices (TILE, 2, 8) of the blocks' elements, by half."""
    half = tl.arange(0, 2)[None, :, None] * 8
    return block[:, None, None] * 16 + half + tl.arange(0, 8)[None, None, :]


@triton.jit
def _load_pairs(w_ptr, block, inside, TILE: tl.constexpr):
    """Even and odd elements of the blocks, (TILE, 2, 4) each: FP32 values of w rounded to BF16."""
    mask = inside[:, None, None]
    if w_ptr.dtype.element_ty == tl.bfloat16:
        word = tl.arange(0, 2)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        word += block[:, None, None] * 8
        words = tl.load(w_ptr.to(tl.pointer_type(tl.int32)) + word, mask=mask, other=0)
        even, odd = words << 16, words & -0x10000
        return even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)
    else:
        w = tl.load(w_ptr + _elements(block), mask=mask, other=0.0)
        return tl.split(tl.reshape(w.to(tl.bfloat16).to(tl.float32), (TILE, 2, 4, 2)))
