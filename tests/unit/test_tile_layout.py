"""Humming's layout: where each code and block scale lies, and back."""

import pytest
import torch

from qat_core.nvfp4 import dequantize, global_scale, group_amax, quantize
from qat_core.nvfp4.format import PackedTensor
from qat_core.rollout.vllm.tile_layout import (
    from_layout,
    lay_out_for_marlin,
    to_layout,
    unpack,
    unpack_marlin,
)


def packed_weight(n: int, k: int) -> PackedTensor:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)).bfloat16()
    weight *= torch.logspace(-4, 4, n, base=2)[:, None].bfloat16()
    return quantize(weight, global_scale(group_amax([[weight]])[0], "pow2"))


def test_each_code_lies_where_the_description_says() -> None:
    n, k = 128, 192
    packed = packed_weight(n, k)
    words, scale = to_layout(packed.codes, packed.block_scale)
    assert words.shape == (k // 16, 2 * n) and scale.shape == (k // 16, n)
    by_byte, scale_bytes = packed.codes.tolist(), packed.block_scale.view(torch.uint8).tolist()
    laid_out, laid_out_scale = words.tolist(), scale.view(torch.uint8).tolist()
    for i in range(n // 64):
        for j in range(k // 16):
            for thread in range(32):
                for w in range(4):
                    for place in range(8):
                        p2, p1, p0 = place >> 2, place >> 1 & 1, place & 1
                        row = 64 * i + 16 * w + 8 * p1 + thread // 4
                        column = 16 * j + 8 * p0 + 2 * (thread % 4) + p2
                        word = laid_out[j][128 * i + 4 * thread + w]
                        code = by_byte[row][column // 2] >> 4 * (column % 2) & 15
                        assert word >> 4 * place & 15 == code
            for a in range(8):
                for b in range(8):
                    assert (
                        laid_out_scale[j][64 * i + 8 * b + a] == scale_bytes[64 * i + 8 * a + b][j]
                    )


@pytest.mark.parametrize(("n", "k"), [(64, 64), (128, 320), (320, 128)])
def test_a_weight_in_the_layout_reads_back_bit_for_bit(n: int, k: int) -> None:
    packed = packed_weight(n, k)
    words, scale = to_layout(packed.codes, packed.block_scale)
    codes, block_scale = from_layout(words, scale)
    assert torch.equal(codes, packed.codes)
    assert torch.equal(block_scale.view(torch.uint8), packed.block_scale.view(torch.uint8))
    multiplier = packed.global_scale.reciprocal().reshape(1)
    assert torch.equal(unpack(words, scale, multiplier), dequantize(packed))


@pytest.mark.parametrize(("n", "k"), [(64, 64), (128, 320), (320, 128)])
def test_a_weight_as_marlin_reads_it_unpacks_bit_for_bit(n: int, k: int) -> None:
    packed = packed_weight(n, k)
    words = torch.empty(k // 16, 2 * n, dtype=torch.int32)
    scale, multiplier = torch.empty(k // 16, n, dtype=torch.uint8), torch.empty(1)
    lay_out_for_marlin(packed, words, scale, multiplier)
    assert torch.equal(unpack_marlin(words, scale, multiplier), dequantize(packed))


@pytest.mark.parametrize(("n", "k"), [(96, 64), (64, 96)])
def test_other_sizes_are_refused_with_a_fix(n: int, k: int) -> None:
    packed = packed_weight(n, k)
    with pytest.raises(ValueError, match=rf"\({n}, {k}\).*multiples of 64; use Marlin"):
        to_layout(packed.codes, packed.block_scale)
