"""Linear layers as vLLM prepares them for its Marlin kernel, on a CPU too."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm._custom_ops as ops
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.utils import marlin_utils
from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin
from vllm.model_executor.layers.quantization.utils.marlin_utils_test import (
    get_weight_perm,
    marlin_weights,
)

from qat_core.nvfp4 import PackedTensor, global_scale, group_amax, quantize

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def prepare_for_marlin_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's reference of the repacking kernel in its place."""

    def repack(b_q_weight: Tensor, perm: Tensor, size_k: int, size_n: int, **_: Any) -> Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        codes = (b_q_weight[:, None] >> shifts[:, None] & 0xF).reshape(size_k, size_n)
        return marlin_weights(codes, size_k, size_n, 4, get_weight_perm(4))

    monkeypatch.setattr(ops, "gptq_marlin_repack", repack)
    workspace = torch.zeros(8, dtype=torch.int32)
    for module in (marlin, marlin_utils):
        monkeypatch.setattr(module, "marlin_make_workspace_new", lambda *_, **__: workspace.clone())


def packed_group(shapes: list[tuple[int, ...]], seed: int) -> list[PackedTensor]:
    """Weights that share a global scale, another for each seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=generator) * 4**seed for shape in shapes]
    weights = [weight.bfloat16().to(DEVICE) for weight in weights]
    scale = global_scale(group_amax([weights])[0], "pow2")
    return [quantize(weight, scale) for weight in weights]


def stacked(parts: list[PackedTensor]) -> PackedTensor:
    codes = torch.cat([part.codes for part in parts])
    scale = torch.cat([part.block_scale.view(torch.uint8) for part in parts])
    return PackedTensor(codes, scale.view(torch.float8_e4m3fn), parts[0].global_scale)


def marlin_linear(parts: list[PackedTensor], rank: int = 0, workers: int = 1) -> Any:
    """A linear layer after vLLM's own preparation of what one of its workers serves."""
    layer: Any = nn.Module()
    packed = stacked(parts)
    layer.output_size_per_partition, layer.input_size_per_partition = packed.shape
    layer.output_partition_sizes = [part.shape[0] for part in parts]
    layer.tp_rank, layer.tp_size = rank, workers
    layer.params_dtype = torch.bfloat16
    layer.weight = nn.Parameter(packed.codes, requires_grad=False)
    layer.weight_scale = nn.Parameter(packed.block_scale, requires_grad=False)
    multiplier = packed.global_scale.reciprocal()
    layer.weight_global_scale = nn.Parameter(multiplier, requires_grad=False)
    marlin.prepare_fp4_layer_for_marlin(layer)
    kernel = type("MarlinNvFp4LinearKernel", (), {})()
    layer.scheme = SimpleNamespace(kernel=kernel)
    return layer
