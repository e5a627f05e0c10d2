"""Kernels that lay packed weights out for vLLM's, and unpack them there, against plain PyTorch."""

import pytest
import torch

from qat_core.nvfp4 import PackedTensor, reference
from qat_core.rollout.vllm import tile_layout, tile_layout_kernels
from tests.kernels.conftest import assert_same_bits


def random_bytes(shape, largest):
    """Codes (..., N, K / 2), and block scales (..., N, K / 16) up to this byte."""
    generator = torch.Generator().manual_seed(2)
    *lead, columns = shape
    codes = torch.randint(0, 256, (*lead, columns // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(8, largest, (*lead, columns // 16), generator=generator)
    scale[..., -1, -1] = largest
    return codes, scale.to(torch.uint8).view(torch.float8_e4m3fn)


LAID_OUT = pytest.mark.parametrize("shape", [(64, 64), (192, 320), (3, 64, 128)], ids=str)


@LAID_OUT
def test_weights_are_laid_out_for_humming(shape, launch, device):
    codes, scale = random_bytes(shape, 126)
    expected = tile_layout.to_layout(codes, scale)
    found = [torch.empty_like(tensor, device=device) for tensor in expected]
    tile_layout_kernels.lay_out_for_humming(codes.to(device), scale.to(device), *found)
    assert torch.equal(found[0].cpu(), expected[0])
    assert_same_bits(found[1], expected[1])


@LAID_OUT
@pytest.mark.parametrize("largest", [9, 0x76, 0x77, 0x7E])
def test_weights_are_laid_out_for_marlin(shape, largest, launch, device):
    """With scales that leave no power of two, one, or many."""
    codes, scale = random_bytes(shape, largest)
    *experts, n, tiles = scale.shape
    global_scale = torch.rand(experts, generator=torch.Generator().manual_seed(3)) * 1e4
    expected = (
        torch.empty(*experts, tiles, 2 * n, dtype=torch.int32),
        torch.empty(*experts, tiles, n, dtype=torch.uint8),
        torch.empty(experts or 1),
    )
    found = [torch.full_like(tensor, 7, device=device) for tensor in expected]
    tile_layout.lay_out_for_marlin(PackedTensor(codes, scale, global_scale), *expected)
    packed = PackedTensor(codes.to(device), scale.to(device), global_scale.to(device))
    tile_layout_kernels.lay_out_for_marlin(packed, *found)
    for tensor, wanted in zip(found, expected, strict=True):
        assert torch.equal(tensor.cpu(), wanted)


@pytest.fixture(params=[(64, 64), (192, 320)], ids=str)
def weight(request):
    return torch.randn(request.param, generator=torch.Generator().manual_seed(2)).bfloat16()


def packed_by_reference(w):
    scale = reference.global_scale(w.float().abs().amax(), "pow2")
    return PackedTensor(*reference.quantize(w, scale, "max"), scale)


def assert_unpacked(found, packed):
    parts = packed.codes, packed.block_scale, packed.global_scale
    assert torch.equal(found.cpu(), reference.dequantize(*parts, torch.bfloat16))


@pytest.mark.parametrize("spread", [1.0, 16.0], ids=["scales alike", "scales apart"])
def test_marlins_layout_unpacks_to_the_values_of_the_reference(weight, spread, launch, device):
    n, tiles = len(weight), weight.shape[1] // 16
    packed = packed_by_reference(weight * torch.logspace(0, 1, n, base=spread)[:, None].bfloat16())
    words = torch.empty(tiles, 2 * n, dtype=torch.int32)
    scales, multiplier = torch.empty(tiles, n, dtype=torch.uint8), torch.empty(1)
    tile_layout.lay_out_for_marlin(packed, words, scales, multiplier)
    laid_out = (tensor.to(device) for tensor in (words, scales, multiplier))
    assert_unpacked(tile_layout_kernels.unpack(*laid_out, is_marlins=True), packed)


def test_hummings_layout_unpacks_to_the_values_of_the_reference(weight, launch, device):
    packed = packed_by_reference(weight)
    words, scales = tile_layout.to_layout(packed.codes.to(device), packed.block_scale.to(device))
    multiplier = packed.global_scale.reciprocal().reshape(1).to(device)
    assert_unpacked(tile_layout_kernels.unpack(words, scales, multiplier), packed)
