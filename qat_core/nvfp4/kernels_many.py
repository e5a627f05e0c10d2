"""Triton kernels of the codec for matrices of one size, anywhere in memory; see `kernels.py`.

A table has a row for each matrix: the grid is (tiles of a matrix, rows).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from qat_core.nvfp4.blocks import magnitude_bits, pack_blocks, round_blocks, tile_of


@triton.jit
def amax_kernel(
    address_ptr,
    slot_ptr,
    amax_ptr,
    matrix_blocks,
    DTYPE: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Raise amax[slot], the bits of an FP32 maximum, to each matrix's largest |bf16(w)|.

    Reads words of one FP32 or two BF16 weights. As integers the bits of non-negative floats keep
    their order, and NaN stays the largest; rounding keeps it too, so only the maximum is rounded.
    Words counted in whole blocks let the compiler see that the mask spares 16-byte loads.
    """
    BLOCK_WORDS: tl.constexpr = DTYPE.primitive_bitwidth // 2
    tile = tl.program_id(0)
    word, inside = tile_of(tile, matrix_blocks * BLOCK_WORDS, EVEN, TILE * BLOCK_WORDS)
    words = tl.load(_at(address_ptr, tl.int32) + word, mask=inside, other=0)
    if BLOCK_WORDS == 8:
        bits = tl.max(tl.maximum(words & 0x7FFF0000, (words << 16) & 0x7FFF0000), axis=0)
    else:
        amax = tl.max(words & 0x7FFFFFFF, axis=0).to(tl.float32, bitcast=True)
        bits = magnitude_bits(amax.to(tl.bfloat16).to(tl.float32))
    tl.atomic_max(amax_ptr + tl.load(slot_ptr + tl.program_id(1)), bits, sem="relaxed")


@triton.jit
def measure_and_round_kernel(
    address_ptr,
    slot_ptr,
    out_byte_ptr,
    global_ptr,
    part_ptr,
    out_ptr,
    matrix_blocks,
    METHOD: tl.constexpr,
    DTYPE: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """As `fake_quantize_kernel`, in the weights' dtype; gives the largest |bf16(w)| of each tile.

    Columns of the table: address, slot in `global`, and at which byte of `out` the result begins, a
    multiple of 16. `part` (rows, tiles) gets the bits of the maxima; atomics as in `amax_kernel`
    are slower here, as those of a matrix run at once and are on one address.
    """
    global_scale = tl.load(global_ptr + tl.load(slot_ptr + tl.program_id(1)))
    w_ptr, place = _at(address_ptr, DTYPE), _place(out_ptr, out_byte_ptr, DTYPE)
    block, inside = tile_of(tl.program_id(0), matrix_blocks, EVEN, TILE)
    even, odd = round_blocks(w_ptr, global_scale, place, block, inside, METHOD, TILE)
    bits = tl.maximum(magnitude_bits(even), magnitude_bits(odd))
    bits = tl.max(tl.reshape(bits, (TILE * 8,)), axis=0)
    tl.store(part_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), bits)


@triton.jit
def round_again_kernel(
    address_ptr,
    slot_ptr,
    out_byte_ptr,
    before_ptr,
    after_ptr,
    out_ptr,
    matrix_blocks,
    METHOD: tl.constexpr,
    PIECE: tl.constexpr,
    DTYPE: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Where a global scale is another one than before, what `measure_and_round_kernel` rounds.

    Few programs, each of many pieces of PIECE blocks, as most find that there is nothing to do.
    """
    slot = tl.load(slot_ptr + tl.program_id(1))
    global_scale = tl.load(after_ptr + slot)
    if tl.load(before_ptr + slot) != global_scale:
        w_ptr, place = _at(address_ptr, DTYPE), _place(out_ptr, out_byte_ptr, DTYPE)
        pieces: tl.constexpr = TILE // PIECE
        for piece in range(pieces):
            tile = tl.program_id(0) * pieces + piece
            if tile * PIECE < matrix_blocks:
                block, inside = tile_of(tile, matrix_blocks, EVEN, PIECE)
                round_blocks(w_ptr, global_scale, place, block, inside, METHOD, PIECE)


@triton.jit
def quantize_all_kernel(
    address_ptr,
    global_address_ptr,
    codes_byte_ptr,
    scale_byte_ptr,
    out_ptr,
    matrix_blocks,
    METHOD: tl.constexpr,
    DTYPE: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """As `quantize_kernel`, for matrices anywhere in memory: a table has one row for each.

    Its columns: address, address of the global scale, and at which bytes of `out` the codes and the
    block scales begin, the codes at a multiple of 8.
    """
    matrix = tl.program_id(1)
    w_ptr = _at(address_ptr, DTYPE)
    global_ptr = tl.load(global_address_ptr + matrix).to(tl.pointer_type(tl.float32))
    codes_ptr = out_ptr + tl.multiple_of(tl.load(codes_byte_ptr + matrix), 8)
    scale_ptr = out_ptr + tl.load(scale_byte_ptr + matrix)
    block, inside = tile_of(tl.program_id(0), matrix_blocks, EVEN, TILE)
    pack_blocks(w_ptr, tl.load(global_ptr), codes_ptr, scale_ptr, block, inside, METHOD, TILE)


@triton.jit
def _at(address_ptr, DTYPE: tl.constexpr):
    """Pointer to this program's matrix, which a column of the table has the address of."""
    w_ptr = tl.load(address_ptr + tl.program_id(1)).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(w_ptr, 16)


@triton.jit
def _place(out_ptr, out_byte_ptr, DTYPE: tl.constexpr):
    """Pointer to this program's matrix of the result."""
    byte = tl.multiple_of(tl.load(out_byte_ptr + tl.program_id(1)), 16)
    return (out_ptr + byte).to(tl.pointer_type(DTYPE))
