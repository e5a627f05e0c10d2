"""The bytes against the definition in rational arithmetic, compressed-tensors, vLLM and Marlin."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qat_core.nvfp4 import dequantize, fake_quantize, global_scale, group_amax, quantize, reference

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3 = [Fraction(8 + m, 8) * Fraction(2) ** e for e in range(-6, 9) for m in range(8)][:-1]
BLOCK_SCALES = ["max", "four_over_six", "mse"]
POLICIES = ["pow2", "amax"]


def nearest(value: Fraction, grid: list[Fraction]) -> int:
    """Index of the nearest number; of two equally near the one with the even index."""
    return min(range(len(grid)), key=lambda i: (abs(grid[i] - value), i % 2))


def exact(x: torch.Tensor) -> list[Fraction]:
    return [Fraction(value) for value in x.double().flatten().tolist()]


def bf16_blocks(draw_exponent: st.SearchStrategy[int]) -> st.SearchStrategy[torch.Tensor]:
    """Sixteen BF16 numbers of 8 significant bits."""
    number = st.builds(lambda m, e: m * 2.0**e, st.integers(-255, 255), draw_exponent)
    return st.lists(number, min_size=16, max_size=16).map(
        lambda values: torch.tensor([values]).bfloat16()
    )


@settings(max_examples=200, deadline=None)
@given(bf16_blocks(st.integers(-20, -6)), st.integers(-4, 20))
def test_codes_and_scales_are_the_nearest_ones(w, exponent):
    """With a power of two as global scale no step but the last rounds, so rationals must agree."""
    divisor = Fraction(2) ** exponent
    codes, scale = reference.quantize(w, torch.tensor(2.0**exponent), "max")
    wanted = max(abs(x) for x in exact(w)) / 6 * divisor
    wanted_scale = E4M3[nearest(min(max(wanted, E4M3[0]), E4M3[-1]), E4M3)]
    assert exact(scale) == [wanted_scale]
    nibbles = [nibble for byte in codes.flatten().tolist() for nibble in (byte & 15, byte >> 4)]
    for x, nibble in zip(exact(w), nibbles, strict=True):
        ratio = x / (wanted_scale / divisor)
        assert nibble & 7 == nearest(min(abs(ratio), Fraction(6)), E2M1)
        assert nibble >> 3 == (ratio < 0)


@settings(max_examples=200, deadline=None)
@given(bf16_blocks(st.integers(-40, 40)), st.sampled_from(POLICIES), st.sampled_from(BLOCK_SCALES))
def test_fake_quantize_is_what_packing_gives_back(w, policy, block_scale):
    divisor = global_scale(reference.amax(w), policy)
    fake = fake_quantize(w, divisor, block_scale)
    unpacked = dequantize(quantize(w, divisor, block_scale))
    assert torch.equal(fake.view(torch.int16), unpacked.view(torch.int16))


@pytest.mark.parametrize(
    ("amax", "pow2"),
    [(2688.0, 1.0), (2704.0, 0.5), (0.0, 1.0), (1e-38, 2.0**94), (3.38e38, 2.0**-117)],
    ids=str,
)
def test_power_of_two_scale_is_the_largest_that_fits(amax, pow2):
    assert global_scale(torch.tensor(amax), "pow2") == pow2


def test_power_of_two_scale_is_the_largest_that_is_not_above_that_of_amax():
    amax = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    scale, bound = global_scale(amax, "pow2"), global_scale(amax, "amax")
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(amax, 0.5))
    assert bool(((scale <= bound) & (bound < 2 * scale)).all())


@pytest.mark.parametrize("policy", POLICIES)
def test_global_scale_of_what_is_not_finite_is_nan(policy):
    amax = torch.tensor([float("nan"), float("inf"), 1.0])
    assert global_scale(amax, policy).isnan().tolist() == [True, True, False]


def test_power_of_two_scale_makes_every_product_exact_in_bf16():
    w = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = quantize(w, global_scale(reference.amax(w)))
    assert torch.equal(dequantize(packed).float(), dequantize(packed, torch.float32))
    inexact = quantize(w, global_scale(reference.amax(w), "amax"))
    assert not torch.equal(dequantize(inexact).float(), dequantize(inexact, torch.float32))


@pytest.mark.parametrize("policy", POLICIES)
def test_search_never_loses_to_the_plain_scale(policy):
    """Per block, and by FP32 rounding at most 1e-6 of the error (16 squares summed)."""
    generator = torch.Generator().manual_seed(1)
    w = (torch.randn(128, 256, generator=generator) * 0.02).bfloat16()
    divisor = global_scale(reference.amax(w), policy)

    def block_error(block_scale):
        values = dequantize(quantize(w, divisor, block_scale), torch.float32)
        return (values.double() - w.double()).view(-1, 16).square().sum(-1)

    plain, four, mse = (block_error(name) for name in BLOCK_SCALES)
    slack = 1 + 1e-6
    assert (four <= plain * slack).all() and (mse <= plain * slack).all()
    assert four.sum() < 0.9 * plain.sum() and mse.sum() < 0.8 * plain.sum()


@pytest.mark.parametrize("block_scale", BLOCK_SCALES)
def test_zero_blocks_give_positive_zeros(block_scale):
    w = torch.cat((torch.zeros(2, 16), -torch.zeros(2, 16), torch.ones(2, 16)), 1).bfloat16()
    fake = fake_quantize(w, torch.tensor(2.0**11), block_scale)
    assert not fake[:, :32].view(torch.int16).any()
    packed = quantize(w, torch.tensor(2.0**11), block_scale)
    assert not packed.codes[:, :16].any() and not dequantize(packed)[:, :32].view(torch.int16).any()


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64, 128, generator=generator).bfloat16() * 0.02
    tiny_rows, tiny_blocks, signed_zeros = normal.clone(), normal.clone(), normal.clone()
    tiny_rows[::4] *= 1e-3
    tiny_blocks[:, 32:48] *= 1e-6
    signed_zeros[::2, ::3] = -0.0
    ties = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    ties = torch.cat((ties, -ties)) * torch.arange(8, 16)[:, None]
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    # Weights 2**-149 of their block underflow to a zero without a sign in every division.
    patterns = patterns[(patterns.abs() < 2.0**60) & (patterns.abs() >= 2.0**-60)]
    return {
        "normal": normal,
        "rows scaled by 1e-3": tiny_rows,
        "blocks scaled by 1e-6": tiny_blocks,
        "signed zeros": signed_zeros,
        "zeros": torch.zeros(4, 32).bfloat16(),
        "ties": ties.bfloat16(),
        "all patterns": patterns.view(-1, 16),
    }


def packed_weight(name: str, policy: str, block_scale: str):
    w = weights()[name]
    scale = global_scale(group_amax([[w]])[0], policy)
    return w, quantize(w, scale, block_scale), fake_quantize(w, scale, block_scale)


@pytest.fixture
def eager_compressed_tensors():
    """compressed-tensors compiles its rounding; its plain code is what is compared."""
    torch.compiler.set_stance("force_eager")
    yield pytest.importorskip("compressed_tensors")
    torch.compiler.set_stance("default")


def test_global_scales_are_those_of_compressed_tensors_in_fp32():
    """Of each BF16 amax but those whose scale is bounded, or not representable."""
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    amax = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    amax = amax[(amax > 2.0**-82) & (amax < 2.0**127)]
    theirs = torch.cat([utils.generate_gparam(-each, each) for each in amax])
    assert torch.equal(global_scale(amax, "amax"), theirs)
    nearest = (2688 / amax.double()).float()
    assert 0.1 < (theirs != nearest).float().mean() < 0.3  # the docstring: a fifth


@pytest.mark.parametrize("block_scale", BLOCK_SCALES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", list(weights()))
def test_bytes_are_those_of_compressed_tensors(eager_compressed_tensors, name, policy, block_scale):
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16

    w, packed, _ = packed_weight(name, policy, block_scale)
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    state = {
        "weight": w,
        "weight_scale": packed.block_scale.float(),
        "weight_global_scale": packed.global_scale.view(1),
    }
    theirs = NVFP4PackedCompressor.compress(state, scheme)
    assert torch.equal(theirs["weight_packed"], packed.codes)
    scales = theirs["weight_scale"].view(torch.uint8)
    assert torch.equal(scales, packed.block_scale.view(torch.uint8))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", list(weights()))
def test_values_are_those_of_vllms_reference(name, policy):
    """vLLM multiplies by FP32(1 / divisor): the same number for a power of two only.

    For other divisors the product may fall to the BF16 neighbour, 2**-7 of the value at most;
    a wrong code or scale would be 2**-3 off or more.
    """
    emulation = pytest.importorskip(
        "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils"
    )
    _, packed, fake = packed_weight(name, policy, "max")
    device = "cuda" if torch.cuda.is_available() else "cpu"  # where it has a GPU it wants that one
    theirs = emulation.dequantize_to_dtype(
        packed.codes.to(device),
        packed.block_scale.to(device),
        1 / packed.global_scale.to(device),
        torch.bfloat16,
        16,
        swizzle=False,
    )
    assert torch.equal(dequantize(packed), fake)
    tolerance = 0.0 if policy == "pow2" else 2.0**-7
    torch.testing.assert_close(theirs.cpu(), fake, rtol=tolerance, atol=0.0)


def marlin_scale(scale_byte: int, rescale: float) -> float:
    """What Marlin's BF16 path multiplies with, from the E4M3 byte, in integers.

    At load vLLM 0.24 (`marlin_utils_fp4.py`) stores half(scale * rescale * 2**7) without its sign
    bit, as 5 exponent and 3 mantissa bits, and values below 2 as zero. The kernel
    (`csrc/quantization/marlin/dequant.h`) puts the top bit at BF16's top exponent bit and the other
    seven at the lowest four exponent and highest three mantissa bits.
    """
    scale = torch.tensor(scale_byte, dtype=torch.uint8).view(torch.float8_e4m3fn)
    half = (scale.half() * rescale) * 2**7
    bits = 0 if half < 2 else int(half.view(torch.int16))
    assert bits & 0x7F == 0, "more than 3 mantissa bits"
    s0e5m3 = bits >> 7
    bf16 = (s0e5m3 & 0x80) << 7 | (s0e5m3 & 0x7F) << 4
    return float(torch.tensor(bf16, dtype=torch.int16).view(torch.bfloat16))


@pytest.mark.parametrize("block_scale", BLOCK_SCALES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", list(weights()))
def test_marlin_multiplies_with_the_trainers_weights(name, policy, block_scale):
    """Code times decoded scale in BF16, global scale in FP32, as in the kernel's epilogue."""
    _, packed, fake = packed_weight(name, policy, block_scale)
    scale_bytes = packed.block_scale.view(torch.uint8)
    rescale = 2.0 ** torch.floor(torch.log2(448 / packed.block_scale.float().max())).item()
    table = [marlin_scale(byte, rescale) if 8 <= byte < 0x7F else 0.0 for byte in range(256)]
    decoded = torch.tensor(table)[scale_bytes.int()].repeat_interleave(16, -1)
    codes = torch.stack((packed.codes & 0xF, packed.codes >> 4), -1).flatten(-2).int()
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    signed = torch.cat((e2m1, -e2m1))[codes]
    product = (signed * decoded).bfloat16()
    assert torch.equal(product.float(), signed * decoded), "inexact in BF16"
    value = product.double() / (packed.global_scale.double() * 2**7 * rescale)
    if policy == "pow2":
        assert torch.equal(value, fake.double())
    else:  # the trainer rounds to BF16 (half a place in 8 bits), the kernel does not
        torch.testing.assert_close(value, fake.double(), rtol=2.0**-8, atol=0.0)
