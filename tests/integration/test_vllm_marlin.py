"""Experts repacked all at once are what vLLM makes of them one by one."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs requirements/vllm.txt")

from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin

from qat_core.nvfp4 import global_scale, group_amax, quantize
from qat_core.rollout.vllm_marlin import permute_scales, prepare_experts

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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_experts_are_those_of_vllms_loop() -> None:
    w13, w13_scale, w13_scale_2 = _packed(2 * INNER, HIDDEN, "cuda")
    w2, w2_scale, w2_scale_2 = _packed(HIDDEN, INNER, "cuda")
    layer = SimpleNamespace(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=INNER,
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
