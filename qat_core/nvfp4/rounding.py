"""Rounding to NVFP4 inside a Triton kernel: block scales, codes and values of a tile of blocks.

A tile of weights is two tensors (TILE, 2, 4): the even (even) and the odd (odd) elements of the two
halves of each block. All operations are IEEE FP32 and give the bits of `reference.py`; most run on
the multiply-add pipes, which are twice as wide as the integer ones.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

# Turns the bits of 2**e into those of 1.5 * 2**(22 + e), whose last place is 2**(e - 1): adding it
# to a number below 2**(e + 1) lets the adder round to one mantissa bit, ties to even.
MAGIC = tl.constexpr((22 << 23) + (1 << 22))


@triton.jit
def scale_of_blocks(even, odd, global_scale, METHOD: tl.constexpr, TILE: tl.constexpr):
    """E4M3 scale (TILE,) as FP32; NaN for a block with NaN or infinity."""
    # The reduction over bits, not values, keeps NaN: it is the largest then.
    pair = tl.maximum(tl.abs(even), tl.abs(odd), propagate_nan=tl.PropagateNan.ALL)
    bits = tl.max(tl.max(pair.to(tl.int32, bitcast=True), axis=2), axis=1)
    amax = bits.to(tl.float32, bitcast=True)
    scale = _to_e4m3(divide(amax, 6.0, 1 / 6) * global_scale)
    if METHOD == "four_over_six":
        other = _to_e4m3(amax * 0.25 * global_scale)
        error = _squared_error(even, odd, global_scale, scale, TILE)
        other_error = _squared_error(even, odd, global_scale, other, TILE)
        scale = tl.where(other_error < error, other, scale)
    if METHOD == "mse":
        code = scale.to(tl.int32, bitcast=True) >> 20
        error = _squared_error(even, odd, global_scale, scale, TILE)
        for step in tl.static_range(-4, 10):
            other_code = tl.minimum(tl.maximum(code + step, 0x3C8), 0x43E)
            other = (other_code << 20).to(tl.float32, bitcast=True)
            other_error = _squared_error(even, odd, global_scale, other, TILE)
            scale = tl.where(other_error < error, other, scale)
            error = tl.where(other_error < error, other_error, error)
    return scale + (amax - amax)


@triton.jit
def _squared_error(even, odd, global_scale, scale, TILE: tl.constexpr):
    """Sum (TILE,) in the order of `reference._squared_error`."""
    scale = scale[:, None, None]
    step = step_of(scale, global_scale)
    even_error = round_to_e2m1(even, step) * scale - even * global_scale
    odd_error = round_to_e2m1(odd, step) * scale - odd * global_scale
    error = even_error * even_error + odd_error * odd_error
    first, second = tl.split(tl.reshape(error, (TILE, 2, 2, 2)))
    first, second = tl.split(first + second)
    return tl.sum(first + second, axis=1)


@triton.jit
def step_of(scale, global_scale):
    """scale / global_scale, the value of code 1.0, to nearest; `global_scale` is a scalar."""
    return divide(scale, global_scale, tl.div_rn(1.0, global_scale))


@triton.jit
def _to_e4m3(x):
    """Nearest E4M3 value in [2**-6, 448], ties to even: 20 of 23 mantissa bits rounded off."""
    bits = tl.minimum(tl.maximum(x, 0.015625), 448.0).to(tl.int32, bitcast=True)
    bits += 0x7FFFF + ((bits >> 20) & 1)
    return (bits & -0x100000).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_to_fp32(byte):
    """Of a positive normal E4M3 number; 0x7F is NaN."""
    bits = (byte.to(tl.int32) << 20) + ((127 - 7) << 23)
    return tl.where(byte == 0x7F, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def reciprocal(y):
    """1 / y for y > 0, rarely not the nearest: the hardware's estimate and a Newton step.

    Estimated as a square, since Triton's own division guards against ranges that no scale has.
    """
    root = tl.rsqrt(y)
    estimate = root * root
    return tl.fma(estimate, tl.fma(estimate, -y, 1.0), estimate)


@triton.jit
def divide(x, y, inverse):
    """x / y to nearest even, given inverse, the FP32 number nearest to 1 / y (Markstein 1990).

    The remainder, exact in a fused multiply-add, corrects the quotient. With `reciprocal(y)` the
    result is on the same side of every E2M1 threshold as the nearest (the tests go through all
    BF16 x). Needs a finite quotient: a global scale that belongs to the weight keeps it near 6.
    """
    quotient = x * inverse
    return tl.fma(tl.fma(quotient, -y, x), inverse, quotient)


@triton.jit
def round_to_e2m1(w, step):
    """E2M1 value nearest to w / step, as `reference._round_to_e2m1_`."""
    ratio = tl.minimum(tl.maximum(divide(w, step, reciprocal(step)), -6.0), 6.0)
    exponent = tl.maximum(ratio.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    magic = (exponent + MAGIC).to(tl.float32, bitcast=True)
    return (ratio + magic) - magic


@triton.jit
def code_words(even, odd, step, TILE: tl.constexpr):
    """Codes of the values nearest to even / step and odd / step, (TILE, 2) words of eight."""
    inverse = reciprocal(step)
    even, odd = divide(even, step, inverse), divide(odd, step, inverse)
    byte = _biased_code(even) + (_biased_code(odd) << 4)
    first, second = tl.split(tl.reshape(byte, (TILE, 2, 2, 2)))
    first, second = tl.split(first + (second << 8))
    # Less the sum of all biases: 0x4B400000 * 2 * 0x11111111 modulo 2**32.
    words = first + (second << 16) - 0x7E800000
    return ((words >> 1) & 0x77777777) | ((words << 3) & -0x77777778)  # signs to the top


@triton.jit
def _biased_code(ratio):
    """Twice 0x4B400000, the bits of 1.5 * 2**23, plus the E2M1 code of `ratio` with its sign last.

    E2M1 steps by 0.5 below 2, by 1 below 4, then by 2; of the codes counted in each step the right
    one is the smallest. Added to 1.5 * 2**23 a count is rounded, ties to even, to the last bits.
    """
    magnitude = tl.minimum(tl.abs(ratio), 6.0)
    halves = tl.fma(magnitude, 2.0, 12582912.0).to(tl.int32, bitcast=True)
    ones = (magnitude + (12582912.0 + 2)).to(tl.int32, bitcast=True)
    twos = tl.fma(magnitude, 0.5, 12582912.0 + 4).to(tl.int32, bitcast=True)
    sign = (ratio.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)
    return (tl.minimum(tl.minimum(halves, ones), twos) << 1) | sign
