"""Triton kernels of the codec; `reference.py` is their specification, bit for bit.

A tile is `(TILE, 16)`: one row a block, of which a thread holds 8 adjacent values (16 bytes), so
that loads and stores are coalesced and the block maximum costs one shuffle. The grid is (tiles of a
matrix, matrices), which makes the global scale one scalar a program. Launches turn FP fusion off:
the only fused multiply-adds are those written here.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def fake_quantize_kernel(
    w_ptr,
    global_ptr,
    out_ptr,
    matrix_blocks,
    BLOCK_SCALE: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """bf16(e2m1(w / step) * step) of BF16 or FP32 `w`, with step = scale / global scale."""
    first, block, inside = _tile(matrix_blocks, EVEN, TILE)
    element = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    w = tl.load(w_ptr + first * 16 + element, mask=inside[:, None], other=0.0)
    w = w.to(tl.bfloat16).to(tl.float32)
    global_scale = tl.load(global_ptr + tl.program_id(1))
    scale = _block_scale(w, global_scale, BLOCK_SCALE, TILE)
    step = tl.div_rn(scale, global_scale)
    value = _round_to_e2m1(_divide(w, step)) * step
    out = out_ptr + first * 16 + element
    tl.store(out, value.to(tl.bfloat16), mask=inside[:, None])


@triton.jit
def quantize_kernel(
    w_ptr,
    global_ptr,
    codes_ptr,
    scale_ptr,
    matrix_blocks,
    BLOCK_SCALE: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """8 bytes of codes and 1 byte of scale a block."""
    first, block, inside = _tile(matrix_blocks, EVEN, TILE)
    global_scale = tl.load(global_ptr + tl.program_id(1))
    w_ptr, codes_ptr, scale_ptr = w_ptr + first * 16, codes_ptr + first * 8, scale_ptr + first
    _pack(w_ptr, global_scale, codes_ptr, scale_ptr, block, inside, BLOCK_SCALE, TILE)


@triton.jit
def quantize_all_kernel(
    address_ptr,
    blocks_ptr,
    global_address_ptr,
    first_ptr,
    codes_ptr,
    scale_ptr,
    BLOCK_SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """As `quantize_kernel`, for matrices anywhere in memory: a table has one row for each.

    Its columns: address, number of blocks, address of the global scale, first block of the result.
    """
    matrix = tl.program_id(1)
    matrix_blocks = tl.load(blocks_ptr + matrix)
    start = tl.program_id(0).to(tl.int64) * TILE
    if start < matrix_blocks:
        w_ptr = tl.load(address_ptr + matrix).to(tl.pointer_type(DTYPE))
        w_ptr = tl.multiple_of(w_ptr, 16)
        global_ptr = tl.load(global_address_ptr + matrix).to(tl.pointer_type(tl.float32))
        first = tl.load(first_ptr + matrix)
        block = start + tl.arange(0, TILE)
        codes_ptr, scale_ptr = codes_ptr + first * 8, scale_ptr + first
        inside = block < matrix_blocks
        _pack(w_ptr, tl.load(global_ptr), codes_ptr, scale_ptr, block, inside, BLOCK_SCALE, TILE)


@triton.jit
def dequantize_kernel(
    codes_ptr, scale_ptr, global_ptr, out_ptr, matrix_blocks, EVEN: tl.constexpr, TILE: tl.constexpr
):
    """code * (scale / global scale) in the output's dtype."""
    first, block, inside = _tile(matrix_blocks, EVEN, TILE)
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    pair = tl.load(codes_ptr + first * 8 + byte, mask=inside[:, None], other=0).to(tl.int32)
    scale_byte = tl.load(scale_ptr + first + block[:, None], mask=inside[:, None], other=8)
    step = tl.div_rn(_e4m3_to_fp32(scale_byte), tl.load(global_ptr + tl.program_id(1)))
    code = tl.reshape(tl.join(pair & 0xF, pair >> 4), (TILE, 16))
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    value = tl.fma(bits.to(tl.float32, bitcast=True) * 8.507059173023462e37, step, 0.0)
    element = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    out = out_ptr + first * 16 + element
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
    BLOCK_SCALE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Codes and scales of the blocks `block` (TILE,) of one matrix."""
    element = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    w = tl.load(w_ptr + element, mask=inside[:, None], other=0.0)
    w = w.to(tl.bfloat16).to(tl.float32)
    scale = _block_scale(w, global_scale, BLOCK_SCALE, TILE)
    ratio = _divide(w, tl.div_rn(scale, global_scale))
    # Times 2**-126, an E2M1 value is an FP32 number with its code in bits 22 to 24.
    value = _round_to_e2m1(ratio) * 1.1754943508222875e-38
    code = (value.to(tl.int32, bitcast=True) >> 22) & 7
    code |= (ratio < 0).to(tl.int32) << 3
    low, high = tl.split(tl.reshape(code, (TILE, 8, 2)))
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(codes_ptr + byte, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])
    scale_byte = (scale.to(tl.int32, bitcast=True) >> 20) - ((127 - 7) << 3)
    scale_byte = tl.where(scale == scale, scale_byte, 0x7F)
    tl.store(scale_ptr + block[:, None], scale_byte.to(tl.uint8), mask=inside[:, None])


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
def _block_scale(w, global_scale, BLOCK_SCALE: tl.constexpr, TILE: tl.constexpr):
    """E4M3 scale (TILE, 1) as FP32; NaN for a block with NaN or infinity."""
    # Maximum over the bits, not the values: NaN is the largest then.
    magnitude = w.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(magnitude, axis=1, keep_dims=True).to(tl.float32, bitcast=True)
    scale = _to_e4m3(tl.div_rn(amax, 6.0) * global_scale)
    if BLOCK_SCALE == "four_over_six":
        other = _to_e4m3(tl.div_rn(amax, 4.0) * global_scale)
        error = _squared_error(w, global_scale, scale, TILE)
        other_error = _squared_error(w, global_scale, other, TILE)
        scale = tl.where(other_error < error, other, scale)
    if BLOCK_SCALE == "mse":
        code = scale.to(tl.int32, bitcast=True) >> 20
        error = _squared_error(w, global_scale, scale, TILE)
        for step in tl.static_range(-4, 10):
            other_code = tl.minimum(tl.maximum(code + step, 0x3C8), 0x43E)
            other = (other_code << 20).to(tl.float32, bitcast=True)
            other_error = _squared_error(w, global_scale, other, TILE)
            scale = tl.where(other_error < error, other, scale)
            error = tl.where(other_error < error, other_error, error)
    return scale + (amax - amax)


@triton.jit
def _squared_error(w, global_scale, scale, TILE: tl.constexpr):
    """Sum (TILE, 1) in the order of `reference._squared_error`."""
    value = _round_to_e2m1(_divide(w, tl.div_rn(scale, global_scale)))
    error = value * scale - w * global_scale
    error = error * error
    error = _add_pairs(error, TILE, 8)
    error = _add_pairs(error, TILE, 4)
    error = _add_pairs(error, TILE, 2)
    return _add_pairs(error, TILE, 1)


@triton.jit
def _add_pairs(x, TILE: tl.constexpr, HALF: tl.constexpr):
    even, odd = tl.split(tl.reshape(x, (TILE, HALF, 2)))
    return even + odd


@triton.jit
def _to_e4m3(x):
    """Nearest E4M3 value in [2**-6, 448], ties to even: 20 of 23 mantissa bits rounded off."""
    bits = tl.minimum(tl.maximum(x, 0.015625), 448.0).to(tl.int32, bitcast=True)
    bits += 0x7FFFF + ((bits >> 20) & 1)
    return (bits & -0x100000).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3_to_fp32(byte):
    """Of a positive normal E4M3 number; 0x7F is NaN."""
    bits = (byte.to(tl.int32) << 20) + ((127 - 7) << 23)
    return tl.where(byte == 0x7F, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _divide(w, step):
    """w / step to nearest even: one reciprocal a block, and a fused correction (Markstein 1990).

    Needs a finite quotient: a global scale that belongs to the weight keeps it near 6.
    """
    reciprocal = tl.div_rn(1.0, step)
    quotient = w * reciprocal
    remainder = tl.fma(-quotient, step, w)
    return tl.fma(remainder, reciprocal, quotient)


@triton.jit
def _round_to_e2m1(ratio):
    """As `reference._round_to_e2m1_`: the adder rounds to one mantissa bit, or to steps of 0.5."""
    ratio = tl.minimum(tl.maximum(ratio, -6.0), 6.0)
    exponent = tl.maximum(ratio.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    magic = (exponent + ((22 << 23) + (1 << 22))).to(tl.float32, bitcast=True)
    return (ratio + magic) - magic
