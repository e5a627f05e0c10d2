"""The NVFP4 codec in plain PyTorch: the specification that the Triton kernels follow bit for bit.

All arithmetic is IEEE FP32 in the order written here. With w a BF16 weight, g its global scale and
s the scale of its block of 16:

    s    = e4m3(clamp(max|w| / 6 * g, 2**-6, 448))
    code = e2m1(w / (s / g))          to nearest, ties to the even code, saturating at 6; w's sign
    w'   = bf16(code * (s / g))       with +0.0 for both zero codes

The order is that of compressed-tensors 0.17 (`quantization/lifecycle/forward.py`). A block that
holds NaN or infinity gets the scale NaN, and so reads back as NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qat_core.nvfp4.format import (
    CODE_BYTES,
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN_NORMAL,
    MAX_GLOBAL_SCALE,
    ShardLayout,
)
from qat_core.options import BLOCK_SIZE, BlockScaleMethod, ScalePolicy

FP32_EXPONENT = 0x7F800000
# The FP32 bits of a normal E4M3 number are (byte << 20) + E4M3_REBIAS: 3 of 23 mantissa bits kept,
# exponent bias 7 against 127.
E4M3_REBIAS = (127 - 7) << 23
E4M3_MIN_BYTE, E4M3_MAX_BYTE = 0x08, 0x7E
# Turns the bits of 2**e into those of 1.5 * 2**(22 + e), whose last place is 2**(e - 1): adding it
# to a number below 2**(e + 1) lets the adder round to one mantissa bit, ties to even.
ROUND_TO_ONE_BIT = (22 << 23) + (1 << 22)
# Steps (E4M3 codes, 8 to an octave) around the scale that maps the block's largest value to 6.
# Beyond them no block of normal, Student-t or SmolLM2 weights has its best scale.
MSE_STEPS = range(-4, 10)
FP32_ONE = 0x3F800000


def amax(w: Tensor) -> Tensor:
    """Largest |bf16(w)| of each matrix, (..., N, K) to FP32 (...); NaN and inf come through."""
    magnitude_bits = (w.bfloat16().view(torch.int16) & 0x7FFF).flatten(-2)
    if magnitude_bits.shape[-1] == 0:
        return torch.zeros(w.shape[:-2], device=w.device)
    return magnitude_bits.amax(-1).view(torch.bfloat16).float()


def group_amax(groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Largest |bf16(w)| over the members of each group, FP32 of their leading dimensions' shape."""
    return [torch.stack([amax(w) for w in members]).amax(0) for members in groups]


def global_scale(amax: Tensor, policy: ScalePolicy) -> Tensor:
    """FP32 divisor from the group's amax; see `qat_core.nvfp4.global_scale`."""
    scale = amax.reciprocal() * (E4M3_MAX * E2M1_MAX)  # rounded twice, as by compressed-tensors
    if policy == "pow2":
        scale = (scale.view(torch.int32) & FP32_EXPONENT).view(torch.float32)
    scale = scale.clamp(max=MAX_GLOBAL_SCALE).masked_fill(amax == 0, 1.0)
    return scale.masked_fill(~amax.isfinite(), torch.nan)


def fake_quantize(w: Tensor, global_scale: Tensor, method: BlockScaleMethod) -> Tensor:
    """BF16 (..., N, K) of the values that `quantize` stores."""
    blocks, block_global, scale = _blocks_and_scale(w, global_scale, method)
    step = scale / block_global
    return _round_to_e2m1_(blocks.div_(step)).mul_(step).bfloat16().view(w.shape)


def measure_and_round(
    groups: Sequence[Sequence[Tensor]],
    _last_scales: Sequence[Tensor],
    policy: ScalePolicy,
    method: BlockScaleMethod,
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """`group_amax`, and each weight rounded with the scale of its group, in its dtype."""
    amax = group_amax(groups)
    scales = [global_scale(of_group, policy) for of_group in amax]
    rounded = [
        [fake_quantize(w, scale, method).to(w.dtype) for w in members]
        for scale, members in zip(scales, groups, strict=True)
    ]
    return amax, rounded


def quantize(w: Tensor, global_scale: Tensor, method: BlockScaleMethod) -> tuple[Tensor, Tensor]:
    """Codes uint8 (..., N, K / 2) and block scales float8_e4m3fn (..., N, K / 16)."""
    blocks, block_global, scale = _blocks_and_scale(w, global_scale, method)
    sign_bit = (blocks < 0).to(torch.uint8) << 3
    values = _round_to_e2m1_(blocks.div_(scale / block_global))
    # Times 2**-6, an E2M1 value is an E4M3 number with its code in bits 2 to 4.
    magnitude = values.abs_().mul_(2.0**-6).to(torch.float8_e4m3fn)
    code = (magnitude.view(torch.uint8) >> 2).clamp_(max=7).bitwise_or_(sign_bit)
    codes = code[:, 0::2] | (code[:, 1::2] << 4)
    *lead, columns = w.shape
    return (
        codes.view(*lead, columns // 2),
        scale.to(torch.float8_e4m3fn).view(*lead, columns // BLOCK_SIZE),
    )


def quantize_all(
    weights: Sequence[Tensor], global_scales: Sequence[Tensor], method: BlockScaleMethod
) -> list[tuple[Tensor, Tensor]]:
    """`quantize` of each weight."""
    pairs = zip(weights, global_scales, strict=True)
    return [quantize(w, global_scale, method) for w, global_scale in pairs]


def pack_shards(
    weights: Sequence[Tensor],
    global_scales: Sequence[Tensor],
    layouts: Sequence[ShardLayout],
    method: BlockScaleMethod,
) -> list[Tensor]:
    """Of each shard's rows codes and block scales in one buffer, uint8 (layout.num_bytes,)."""
    buffers = []
    for w, scale, layout in zip(weights, global_scales, layouts, strict=True):
        codes, block_scale = quantize(w, scale, method)
        buffer = codes.new_zeros(layout.num_bytes)
        buffer[: codes.numel()] = codes.flatten()
        scale_bytes = block_scale.view(torch.uint8).flatten()
        buffer[layout.num_blocks * CODE_BYTES :][: len(scale_bytes)] = scale_bytes
        buffers.append(buffer)
    return buffers


def unpack_shards(shards: Tensor, layout: ShardLayout, global_scale: Tensor, out: Tensor) -> None:
    """The whole weight, rounded to BF16, into `out`, from the buffers of all shards in a row."""
    if not out.numel():
        return
    code_bytes = layout.num_blocks * CODE_BYTES
    codes, scale_bytes, _ = shards.view(-1, layout.num_bytes).tensor_split(
        (code_bytes, code_bytes + layout.num_blocks), dim=1
    )
    *lead, columns = out.shape[1:]
    codes = codes.reshape(-1, *lead, columns // 2)[: len(out)]
    scale_bytes = scale_bytes.reshape(-1, *lead, columns // BLOCK_SIZE)[: len(out)]
    scale = scale_bytes.view(torch.float8_e4m3fn)
    out.copy_(dequantize(codes, scale, global_scale, torch.float32).bfloat16())


def dequantize(
    codes: Tensor, block_scale: Tensor, global_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """(..., N, K) in `dtype` from codes (..., N, K / 2) and block scales (..., N, K / 16)."""
    step = (block_scale.float() / global_scale[..., None, None]).reshape(-1, 1)
    code = torch.stack((codes & 0xF, codes >> 4), dim=-1).view(-1, BLOCK_SIZE)
    e4m3 = ((code & 7) << 2) | ((code & 8) << 4)
    values = e4m3.view(torch.float8_e4m3fn).float().mul_(2.0**6)
    values = values.mul_(step).add_(0.0).to(dtype)
    return values.view(*codes.shape[:-1], 2 * codes.shape[-1])


def _blocks_and_scale(
    w: Tensor, global_scale: Tensor, method: BlockScaleMethod
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
    if method == "four_over_six":
        scale = _best_of(blocks, block_global, scale, [_to_e4m3(block_amax / 4 * block_global)])
    elif method == "mse":
        scale = _best_of(blocks, block_global, scale, [_step_e4m3(scale, n) for n in MSE_STEPS])
    # Clamping turned infinity into 448: x - x is NaN for infinity and NaN, else 0.
    return blocks, block_global, scale.add_(block_amax - block_amax)


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
    values = _round_to_e2m1_(blocks / (scale / block_global))
    error = (values.mul_(scale) - blocks * block_global).square_()
    while error.shape[1] > 1:  # FP32 sums depend on their order: adjacent pairs, four times
        error = error[:, 0::2] + error[:, 1::2]
    return error


def _round_to_e2m1_(ratio: Tensor) -> Tensor:
    """Round FP32 in place to E2M1 values, ties to even, saturating; every zero becomes +0.0."""
    ratio.clamp_(-E2M1_MAX, E2M1_MAX)
    exponent = (ratio.view(torch.int32) & FP32_EXPONENT).clamp_(min=FP32_ONE)
    magic = exponent.add_(ROUND_TO_ONE_BIT).view(torch.float32)
    return ratio.add_(magic).sub_(magic)
