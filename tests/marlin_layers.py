"""Layers as vLLM prepares them for its Marlin kernels, on a CPU too, and syncs in place to them."""

from pathlib import Path
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

from qat_core.checkpoint.architecture import meta_model
from qat_core.nvfp4 import PackedTensor, global_scale, group_amax, quantize
from qat_core.rollout.vllm.in_place.sync import write_packed
from qat_core.rollout.vllm.in_place.targets import find_targets
from qat_core.rollout.vllm.marlin.layout import prepare_experts

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
EXPERTS, HIDDEN, INNER = 4, 256, 128
EXPERT_NAMES = ["l.mlp.experts.gate_up_proj", "l.mlp.experts.down_proj"]
QKV = {"q": 128, "k": 64, "v": 64}


def prepare_for_marlin_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's reference of the repacking kernel in its place."""

    def repack(b_q_weight: Tensor, size_k: int, size_n: int, **_: Any) -> Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        codes = (b_q_weight[:, None] >> shifts[:, None] & 0xF).reshape(size_k, size_n)
        return marlin_weights(codes, size_k, size_n, 4, get_weight_perm(4))

    monkeypatch.setattr(ops, "gptq_marlin_repack", repack)
    workspace = torch.zeros(8, dtype=torch.int32)
    for module in (marlin, marlin_utils):
        if hasattr(module, "marlin_make_workspace_new"):  # of one of them since vLLM 0.30
            monkeypatch.setattr(
                module, "marlin_make_workspace_new", lambda *_, **__: workspace.clone()
            )


def packed_group(shapes: list[tuple[int, ...]], seed: int) -> list[PackedTensor]:
    """Weights that share a global scale, another for each seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=generator) * 4**seed for shape in shapes]
    weights = [weight.bfloat16().to(DEVICE) for weight in weights]
    scale = global_scale(group_amax([weights])[0], "pow2")
    return [quantize(weight, scale) for weight in weights]


def stacked(parts: list[PackedTensor]) -> PackedTensor:
    """Matrices, or those of each expert, one above the other."""
    codes = torch.cat([part.codes for part in parts], -2)
    scale = torch.cat([part.block_scale.view(torch.uint8) for part in parts], -2)
    return PackedTensor(codes, scale.view(torch.float8_e4m3fn), parts[0].global_scale)


def marlin_linear(
    parts: list[PackedTensor], rank: int = 0, workers: int = 1, dim: int = 0, replicas: int = 1
) -> Any:
    """A linear layer after vLLM's own preparation of what one of its workers serves.

    Args:
        dim: rows or columns, which the workers share out.
        replicas: workers that serve the same keys and values.
    """
    layer: Any = nn.Module()
    packed = stacked(parts)
    layer.output_size_per_partition, layer.input_size_per_partition = packed.shape
    layer.output_partition_sizes = [part.shape[0] for part in parts]
    layer.input_size = packed.shape[1] * (workers if dim else 1)
    layer.output_sizes = [part.shape[0] * (1 if dim else workers) for part in parts]
    layer.num_kv_head_replicas = replicas
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


def marlin_experts(
    w13: PackedTensor, w2: PackedTensor, rank: int = 0, workers: int = 1, own: Any = None
) -> Any:
    """Experts after the preparation that is tested against vLLM's in test_vllm_marlin.py.

    Args:
        own: the experts of an expert parallel worker.
    """
    layer: Any = nn.Module()
    layer.num_experts, layer.hidden_size = w2.shape[:2]
    layer.intermediate_size_per_partition = w2.shape[2]
    parallel = SimpleNamespace(
        tp_rank=0 if own else rank, tp_size=1 if own else workers, ep_size=workers if own else 1
    )
    layer.moe_config = SimpleNamespace(num_experts=EXPERTS, moe_parallel_config=parallel)
    layer._map_global_expert_id_to_local_expert_id = lambda it: own.index(it) if it in own else -1
    layer.params_dtype = torch.bfloat16
    prepared = prepare_experts(
        layer,
        w13.codes,
        w13.block_scale,
        w13.global_scale.reciprocal(),
        w2.codes,
        w2.block_scale,
        w2.global_scale.reciprocal(),
        is_act_and_mul=True,
    )
    for matrix, tensors in (("w13", prepared[:3]), ("w2", prepared[3:])):
        codes, scale, scale_2 = tensors
        setattr(layer, f"{matrix}_weight", nn.Parameter(codes, requires_grad=False))
        setattr(layer, f"{matrix}_weight_scale", nn.Parameter(scale, requires_grad=False))
        setattr(layer, f"{matrix}_weight_scale_2", scale_2)
    # as vLLM's loader leaves it, of gate and up apart
    for name, loaded in (("w13", w13.global_scale[:, None].repeat(1, 2)), ("w2", w2.global_scale)):
        loaded = nn.Parameter(loaded.clone(), requires_grad=False)
        setattr(layer, f"{name}_weight_global_scale", loaded)
    layer.quant_method = SimpleNamespace(nvfp4_backend=SimpleNamespace(name="MARLIN"))
    return layer


def tensors_of(layer: Any) -> dict[str, Tensor]:
    return {
        name: tensor.data
        for name, tensor in {**vars(layer), **dict(layer.named_parameters())}.items()
        if isinstance(tensor, Tensor)
    }


def assert_written(layer: Any, expected: Any, addresses: dict[str, int]) -> None:
    wanted = tensors_of(expected)
    for name, tensor in tensors_of(layer).items():
        assert torch.equal(
            tensor.flatten().view(torch.uint8), wanted[name].flatten().view(torch.uint8)
        )
        assert tensor.data_ptr() == addresses[name]


def packed_experts(seed: int, inner: int = INNER) -> list[PackedTensor]:
    shapes = [(EXPERTS, 2 * inner, HIDDEN), (EXPERTS, HIDDEN, inner)]
    return [packed_group([shape], seed)[0] for shape in shapes]


def assert_experts_written(layer: Any, expected: Any, inner: int = INNER) -> None:
    addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(layer).items()}
    targets = find_targets([(layer, EXPERT_NAMES)], {})
    list(write_packed(zip(EXPERT_NAMES, packed_experts(1, inner), strict=True), targets, None))
    assert_written(layer, expected, addresses)


def drawn(folder: Path, seed: int) -> nn.Module:
    """A model of a folder's architecture on a GPU; another seed has weights of another size too."""
    torch.manual_seed(seed)
    model = meta_model(folder).to_empty(device="cuda")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02 * 4**seed)
    return model


def all_tensors(worker: Any) -> dict[str, Tensor]:
    """The bytes of all that a worker's model holds, but for the KV cache."""
    return {
        f"{prefix}.{name}": tensor.data.flatten().clone().view(torch.uint8)
        for prefix, module in worker.model_runner.get_model().named_modules()
        for name, tensor in {**vars(module), **module._parameters, **module._buffers}.items()
        if isinstance(tensor, Tensor) and name != "kv_cache" and tensor.numel()
    }
