"""Blocks of 16 weights in Triton: read, round, pack and unpack a tile of them.

A tile holds TILE blocks. Weights are read as (TILE, 2, 4) words of two BF16: Triton then gives a
thread whole blocks, 16 bytes a load, so that a block's scale is computed once and shuffles nothing.
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
def tile_of(tile, num_blocks, EVEN: tl.constexpr, TILE: tl.constexpr):
    """Block indices of this tile, and which are inside, of so many blocks.

    Where all are (EVEN) the compiler drops the masks.
    """
    block = tile * TILE + tl.arange(0, TILE)
    inside = block < num_blocks
    if EVEN:
        inside = tl.full((TILE,), True, tl.int1)
    return block, inside


@triton.jit
def round_blocks(
    w_ptr, global_scale, out_ptr, block, inside, METHOD: tl.constexpr, TILE: tl.constexpr
):
    """Rounds the blocks `block` (TILE,) of one matrix; returns the pairs that it read."""
    even, odd = _load_pairs(w_ptr, block, inside, TILE)
    scale = scale_of_blocks(even, odd, global_scale, METHOD, TILE)
    step = step_of(scale, global_scale)[:, None, None]
    value = tl.join(round_to_e2m1(even, step) * step, round_to_e2m1(odd, step) * step)
    value = tl.reshape(value, (TILE, 2, 8)).to(tl.bfloat16).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + _elements(block), value, mask=inside[:, None, None])
    return even, odd


@triton.jit
def pack_blocks(
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
def unpack_blocks(codes_ptr, scale_ptr, global_scale, block, inside, TILE: tl.constexpr):
    """FP32 values (TILE, 16) of the blocks `block` (TILE,) of one matrix."""
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    pair = tl.load(codes_ptr + byte, mask=inside[:, None], other=0).to(tl.int32)
    scale_byte = tl.load(scale_ptr + block[:, None], mask=inside[:, None], other=8)
    step = step_of(e4m3_to_fp32(scale_byte), global_scale)
    code = tl.reshape(tl.join(pair & 0xF, pair >> 4), (TILE, 16))
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return tl.fma(bits.to(tl.float32, bitcast=True) * 8.507059173023462e37, step, 0.0)


@triton.jit
def magnitude_bits(x):
    """Of FP32 x without its sign, as an integer of the same order; NaN is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


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


@triton.jit
def _elements(block):
    """Indices (TILE, 2, 8) of the blocks' elements, by half."""
    half = tl.arange(0, 2)[None, :, None] * 8
    return block[:, None, None] * 16 + half + tl.arange(0, 8)[None, None, :]
