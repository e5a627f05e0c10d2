"""The NVFP4 codec in plain PyTorch: the specification that the Triton kernels follow bit for bit.

All arithmetic is IEEE FP32 in the order written here. With w a BF16 weight, g its global scale and
s the scale of its block of 16:

    s    = e4m3(clamp(max|w| / 6 * g, 2**-6, 448))
    code = e2m1(w / (s / g))          to nearest, ties to the even code, saturating at 6
    w'   = bf16(code * (s / g))

The order is that of compressed-tensors 0.17 (`quantization/lifecycle/forward.py`). A block that
holds NaN or infinity gets the scale NaN, and so reads back as NaN.
"""

import torch
from torch import Tensor

from qat_core.nvfp4.format import (
    BLOCK_SIZE,
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN_NORMAL,
    MAX_GLOBAL_SCALE,
    BlockScale,
    ScalePolicy,
)

FP32_EXPONENT = 0x7F800000
# The FP32 bits of a normal E4M3 number are (byte << 20) + E4M3_REBIAS: 3 of 23 mantissa bits kept,
# exponent bias 7 against 127.
E4M3_REBIAS = (127 - 7) << 23
E4M3_MIN_BYTE, E4M3_MAX_BYTE, E4M3_NAN_BYTE = 0x08, 0x7E, 0x7F
# 1.5 * 2**22 as an exponent offset: adding 1.5 * 2**22 * 2**e to |y| < 2**(e + 1) leaves one
# mantissa bit, rounded to nearest even by the adder itself.
ROUND_TO_ONE_BIT = (22 << 23) + (1 << 22)
# Steps (E4M3 codes, 8 to an octave) around the scale that maps the block's largest value to 6.
# Beyond them no block of normal, Student-t or SmolLM2 weights has its best scale.
MSE_STEPS = range(-4, 10)
FP32_ONE = 0x3F800000


def amax(w: Tensor) -> Tensor:
    """Largest |bf16(w)| of each matrix, (..., N, K) to FP32 (...); NaN and infinity come through."""
    magnitude_bits = (w.bfloat16().view(torch.int16) & 0x7FFF).flatten(-2)
    if magnitude_bits.shape[-1] == 0:
        return torch.zeros(w.shape[:-2], device=w.device)
    return magnitude_bits.amax(-1).view(torch.bfloat16).float()


def global_scale(amax: Tensor, policy: ScalePolicy) -> Tensor:
    """FP32 divisor from the group's amax; see `qat_core.nvfp4.global_scale`."""
    scale = E4M3_MAX * E2M1_MAX / amax
    if policy == "pow2":
        scale = (scale.view(torch.int32) & FP32_EXPONENT).view(torch.float32)
    scale = scale.clamp(max=MAX_GLOBAL_SCALE).masked_fill(amax == 0, 1.0)
    return scale.masked_fill(~amax.isfinite(), torch.nan)


def fake_quantize(w: Tensor, global_scale: Tensor, block_scale: BlockScale) -> Tensor:
    """BF16 (..., N, K) of the values that `quantize` stores, in one pass."""
    blocks, block_global, scale = _blocks_and_scale(w, global_scale, block_scale)
    step = scale.div_(block_global)
    return _nearest_e2m1_(blocks.div_(step)).mul_(step).bfloat16().view(w.shape)


def quantize(w: Tensor, global_scale: Tensor, block_scale: BlockScale) -> tuple[Tensor, Tensor]:
    """Codes uint8 (..., N, K / 2) and block scales float8_e4m3fn (..., N, K / 16)."""
    blocks, block_global, scale = _blocks_and_scale(w, global_scale, block_scale)
    values = _nearest_e2m1_(blocks.div_(scale / block_global))
    # E2M1 is FP32 with one mantissa bit and the exponent bias 1: scale 1.0 down to exponent 1.
    magnitude = (values.abs() * 2.0**-126).view(torch.int32) >> 22
    code = (magnitude | (values.signbit().int() << 3)).to(torch.uint8)
    packed = code[:, 0::2] | (code[:, 1::2] << 4)
    scale_byte = ((scale.view(torch.int32) - E4M3_REBIAS) >> 20).to(torch.uint8)
    scale_byte = scale_byte.masked_fill_(scale.isnan(), E4M3_NAN_BYTE)
    *lead, columns = w.shape
    return (
        packed.view(*lead, columns // 2),
        scale_byte.view(torch.float8_e4m3fn).view(*lead, columns // BLOCK_SIZE),
    )


def dequantize(codes: Tensor, block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """FP32 (..., N, K) from codes (..., N, K / 2) and block scales (..., N, K / 16)."""
    step = (block_scale.float() / global_scale[..., None, None]).reshape(-1, 1)
    code = torch.stack((codes & 0xF, codes >> 4), dim=-1).view(-1, BLOCK_SIZE).int()
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    values = bits.view(torch.float32) * 2.0**126
    return values.mul_(step).view(*codes.shape[:-1], 2 * codes.shape[-1])


def _blocks_and_scale(
    w: Tensor, global_scale: Tensor, block_scale: BlockScale
) -> tuple[Tensor, Tensor, Tensor]:
    """FP32 blocks (B, 16), their global scale (B, 1) or (), and block scale (B, 1)."""
    w = w.bfloat16().contiguous()
    blocks = w.view(-1, BLOCK_SIZE)
    block_global = global_scale
    if global_scale.ndim:
        per_matrix = w.shape[-2] * w.shape[-1] // BLOCK_SIZE
        block_global = global_scale.reshape(-1, 1).repeat_interleave(per_matrix, 0)
    block_amax = amax(blocks[:, None, :])[:, None]
    blocks = blocks.float()
    scale = _to_e4m3(block_amax / E2M1_MAX * block_global)
    if block_scale == "four_over_six":
        scale = _best_of(blocks, block_global, scale, [_to_e4m3(block_amax / 4 * block_global)])
    elif block_scale == "mse":
        scale = _best_of(blocks, block_global, scale, [_step_e4m3(scale, n) for n in MSE_STEPS])
    return blocks, block_global, scale.masked_fill_(~block_amax.isfinite(), torch.nan)


def _to_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 value in [2**-6, 448] as FP32, ties to even."""
    bits = x.clamp(E4M3_MIN_NORMAL, E4M3_MAX).view(torch.int32)
    bits = bits + (0x7FFFF + ((bits >> 20) & 1))
    return (bits & ~0xFFFFF).view(torch.float32)


def _step_e4m3(scale: Tensor, steps: int) -> Tensor:
    """The E4M3 value `steps` codes above `scale`, kept in [2**-6, 448]."""
    code = ((scale.view(torch.int32) - E4M3_REBIAS) >> 20) + steps
    code = code.clamp(E4M3_MIN_BYTE, E4M3_MAX_BYTE)
    return ((code << 20) + E4M3_REBIAS).view(torch.float32)


def _best_of(blocks: Tensor, block_global: Tensor, scale: Tensor, others: list[Tensor]) -> Tensor:
    """Per block the scale with the least squared error; the first wins a tie."""
    error = _squared_error(blocks, block_global, scale)
    for other in others:
        other_error = _squared_error(blocks, block_global, other)
        better = other_error < error
        scale = torch.where(better, other, scale)
        error = torch.where(better, other_error, error)
    return scale


def _squared_error(blocks: Tensor, block_global: Tensor, scale: Tensor) -> Tensor:
    """Sum of squares (B, 1) of the rounding error in units of 1 / global scale."""
    values = _nearest_e2m1_(blocks / (scale / block_global))
    error = (values.mul_(scale) - blocks * block_global).square_()
    while error.shape[1] > 1:  # FP32 sums depend on their order: adjacent pairs, four times
        error = error[:, 0::2] + error[:, 1::2]
    return error


def _nearest_e2m1_(y: Tensor) -> Tensor:
    """Round FP32 to E2M1 values in place, ties to even, saturating; keeps the sign of a zero.

    -0.0 becomes +0.0 first, as compressed-tensors packs it; a negative that rounds to zero keeps
    its sign.
    """
    y.add_(0.0).clamp_(-E2M1_MAX, E2M1_MAX)
    exponent = (y.view(torch.int32) & FP32_EXPONENT).clamp_(min=FP32_ONE)
    magic = exponent.add_(ROUND_TO_ONE_BIT).view(torch.float32)
    return torch.copysign((y + magic).sub_(magic), y)
