"""The plain PyTorch codec against the format's definition, in exact rational arithmetic."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qat_core.nvfp4 import dequantize, fake_quantize, global_scale, quantize, reference

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
    ("ratio", "code"),
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (6.0, 7), (0.0, 0)],
)
@pytest.mark.parametrize("scale", [1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875])
def test_ties_go_to_the_even_code(ratio, code, scale):
    w = torch.zeros(1, 16, dtype=torch.bfloat16)
    w[0, 0], w[0, 1], w[0, 2] = 6 * scale, ratio * scale, -ratio * scale
    codes, _ = reference.quantize(w, torch.tensor(1.0), "max")
    assert codes[0, 0] >> 4 == code
    assert codes[0, 1] & 0xF == (code | 8 if ratio else 0)


@pytest.mark.parametrize(
    ("amax", "pow2"),
    [
        (2688.0, 1.0),
        (2704.0, 0.5),
        (1.3125, 2.0**11),
        (1.3203125, 2.0**10),
        (0.0, 1.0),
        (1e-38, 2.0**94),
        (3.3895313892515355e38, 2.0**-117),
    ],
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


def test_codes_lie_low_nibble_first():
    w = torch.zeros(1, 16, dtype=torch.bfloat16)
    w[0, 0], w[0, 1] = 6.0, -1.0
    codes, _ = reference.quantize(w, torch.tensor(1.0), "max")
    assert codes[0].tolist() == [0x7 | 0xA << 4, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("block_scale", BLOCK_SCALES)
def test_zero_blocks_give_positive_zeros(block_scale):
    w = torch.cat((torch.zeros(2, 16), -torch.zeros(2, 16), torch.ones(2, 16)), 1).bfloat16()
    fake = fake_quantize(w, torch.tensor(2.0**11), block_scale)
    assert not fake[:, :32].view(torch.int16).any()
    packed = quantize(w, torch.tensor(2.0**11), block_scale)
    assert not packed.codes[:, :16].any() and not dequantize(packed)[:, :32].view(torch.int16).any()
