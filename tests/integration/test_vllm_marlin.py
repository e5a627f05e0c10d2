"""Weights repacked with less time and memory are what vLLM makes of them."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin

from qat_core.nvfp4 import global_scale, group_amax, quantize
from qat_core.rollout.vllm.marlin.layout import (
    are_padded,
    fit_tiles,
    lean_repacking,
    permute_scales,
    prepare_experts,
)
from tests.marlin_layers import prepare_for_marlin_on_a_cpu

EXPERTS, HIDDEN, INNER = 4, 256, 128


def _packed(rows: int, columns: int, device: str) -> tuple[torch.Tensor, ...]:
    """Codes, block scales and multipliers of experts whose sizes differ up to 64 times."""
    torch.manual_seed(0)
    weight = torch.randn(EXPERTS, rows, columns, device=device)
    weight *= torch.logspace(-3, 3, EXPERTS, base=2, device=device)[:, None, None]
    (amax,) = group_amax([[weight.bfloat16()]])
    packed = quantize(weight.bfloat16(), global_scale(amax, "pow2"), "max")
    return packed.codes, packed.block_scale, packed.global_scale.reciprocal()


def test_block_scales_are_those_of_vllms_loop() -> None:
    _, block_scale, multiplier = _packed(2 * INNER, HIDDEN, "cpu")
    scales = block_scale.bfloat16()
    factor = marlin._nvfp4_compute_scale_factor(scales, torch.bfloat16)
    expected = []
    for matrix in scales:
        permuted = marlin.marlin_permute_scales(
            s=matrix.T, size_k=HIDDEN, size_n=2 * INNER, group_size=16
        )
        expected.append(
            marlin.nvfp4_marlin_process_scales(
                permuted, scale_factor=factor, a_dtype=torch.bfloat16
            )[0]
        )
    found, found_multiplier = permute_scales(block_scale, multiplier, torch.bfloat16)
    assert torch.equal(found.view(torch.uint8), torch.stack(expected).view(torch.uint8))
    bias = marlin.nvfp4_marlin_process_global_scale(torch.ones(1), torch.bfloat16)
    assert torch.equal(found_multiplier, multiplier * bias / factor)


@pytest.mark.parametrize("largest", [0.0, 2.0**-6, 0.3, 17.0, 224.0, 448.0])
def test_the_factor_of_block_scales_is_vllms(largest: float) -> None:
    scales = largest * torch.rand(64, 16, generator=torch.Generator().manual_seed(0))
    scales[::3] = 0  # blocks of zeros
    scales[1, 1] = largest
    scales = scales.to(torch.float8_e4m3fn).bfloat16()
    expected = marlin._nvfp4_compute_scale_factor(scales, torch.bfloat16)
    with lean_repacking():
        assert marlin._nvfp4_compute_scale_factor(scales, torch.bfloat16) == expected
    power = 0 if largest in (0.0, 448.0) else math.floor(math.log2(448 / largest))
    assert expected == 2.0**power


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a stand-in for a kernel of CUDA")
@pytest.mark.parametrize("hidden", [192, 256])
@pytest.mark.parametrize("inner", [64, 96, 128, 192, 256])
def test_experts_are_padded_where_vllm_pads(
    hidden: int, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_for_marlin_on_a_cpu(monkeypatch)
    layer = SimpleNamespace(num_experts=EXPERTS, hidden_size=hidden, params_dtype=torch.bfloat16)
    layer.intermediate_size_per_partition = inner
    w13, w2 = _packed(2 * inner, hidden, "cpu"), _packed(hidden, inner, "cpu")
    layer.w13_weight, _, _, layer.w2_weight, _, _ = marlin.prepare_nvfp4_moe_layer_for_marlin(
        layer, *w13, *w2, is_act_and_mul=True
    )
    assert (
        fit_tiles(hidden, inner)
        == (not are_padded(layer))
        == (inner % 64 == 0 and (hidden % 128 == 0 or inner % 128 == 0))
    )


def _marlin_linear() -> nn.Module:
    """A linear layer of vLLM as it is before it is prepared for Marlin."""
    codes, block_scale, multiplier = _packed(2 * INNER, HIDDEN, "cuda")
    layer = nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition = 2 * INNER, HIDDEN
    layer.params_dtype = torch.bfloat16
    layer.weight = nn.Parameter(codes[0], requires_grad=False)
    layer.weight_scale = nn.Parameter(block_scale[0], requires_grad=False)
    layer.weight_global_scale = nn.Parameter(multiplier[0], requires_grad=False)
    return layer


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_linear_layer_is_vllms() -> None:
    mine, vllms = _marlin_linear(), _marlin_linear()
    marlin.prepare_fp4_layer_for_marlin(vllms)
    with lean_repacking():
        marlin.prepare_fp4_layer_for_marlin(mine)
    for name, expected in vllms.named_parameters():
        found = mine.get_parameter(name)
        assert torch.equal(found.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("inner", [INNER, 192])
def test_experts_are_those_of_vllms_loop(inner: int) -> None:
    w13, w13_scale, w13_scale_2 = _packed(2 * inner, HIDDEN, "cuda")
    w2, w2_scale, w2_scale_2 = _packed(HIDDEN, inner, "cuda")
    layer = SimpleNamespace(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=inner,
        params_dtype=torch.bfloat16,
    )
    arguments = {
        "layer": layer,
        "w13": w13,
        "w13_scale": w13_scale,
        "w13_scale_2": w13_scale_2,
        "w2": w2,
        "w2_scale": w2_scale,
        "w2_scale_2": w2_scale_2,
        "is_act_and_mul": True,
    }
    expected = marlin.prepare_nvfp4_moe_layer_for_marlin(**arguments)
    for mine, vllms in zip(prepare_experts(**arguments), expected, strict=True):
        assert mine.shape == vllms.shape and mine.dtype == vllms.dtype
        assert torch.equal(mine.view(torch.uint8), vllms.view(torch.uint8))
    assert layer.workspace.eq(0).all()
