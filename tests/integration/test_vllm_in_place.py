"""Weights written into the tensors of vLLM's kernels are those that its own preparation makes."""

import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

import vllm
from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin

from experiments.benchmarks.architectures import ARCHITECTURES, engine_settings
from experiments.benchmarks.random_model import write_architecture
from experiments.support.subprocess_call import call_in_subprocess
from qat_core.checkpoint.architecture import meta_model
from qat_core.nvfp4 import PackedTensor
from qat_core.plan import plan
from qat_core.recipe import Recipe
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.rollout.vllm.in_place import (
    VARIABLE,
    Target,
    find_targets,
    write_marlin,
    write_packed,
    writing,
)
from qat_core.rollout.vllm.marlin import prepare_experts
from qat_core.rollout.vllm.shares import own_of_linear
from qat_core.rollout.vllm.tile_layout import marlin_scales
from qat_core.weights.stream import weight_stream
from tests.marlin_layers import (
    ON_GPU,
    marlin_linear,
    packed_group,
    prepare_for_marlin_on_a_cpu,
)

pytestmark = pytest.mark.skipif(
    Version(vllm.__version__) >= Version("0.30"),
    reason="Marlin runs on CUDA, where vLLM is 0.24; from 0.30 it repacks without an order",
)

EXPERTS, HIDDEN, INNER = 4, 256, 128
EXPERT_NAMES = ["l.mlp.experts.gate_up_proj", "l.mlp.experts.down_proj"]
QKV = {"q": 128, "k": 64, "v": 64}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        prepare_for_marlin_on_a_cpu(monkeypatch)


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
    of_tensors = (0, 1) if own else (rank, workers)
    parallel = dict(zip(("tp_rank", "tp_size"), of_tensors, strict=True))
    parallel["ep_size"] = workers if own else 1
    layer.moe_config = SimpleNamespace(
        num_experts=EXPERTS, moe_parallel_config=SimpleNamespace(**parallel)
    )
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


@pytest.mark.parametrize("largest", [8, 0x40, 0x76, 0x77, 0x78, 0x7D, 0x7E])
def test_scales_are_those_of_vllms_computation(largest: int) -> None:
    generator = torch.Generator().manual_seed(largest)
    byte = torch.randint(8, largest + 1, (128, 24), dtype=torch.uint8, generator=generator)
    byte[3, 5] = largest
    scale = byte.view(torch.float8_e4m3fn)
    rows = marlin.marlin_permute_scales(s=scale.T.bfloat16(), size_k=384, size_n=128, group_size=16)
    expected, factor = marlin.nvfp4_marlin_process_scales(rows, a_dtype=torch.bfloat16)
    found, power = marlin_scales(scale)
    assert torch.equal(found, expected.view(torch.uint8)) and factor == 2.0 ** power.item()


def test_a_fused_linear_is_written_once_its_last_part_has_come() -> None:
    shapes = [(rows, HIDDEN) for rows in QKV.values()]
    layer = marlin_linear(packed_group(shapes, seed=0))
    layer.workspace.fill_(7)  # left by a kernel that was cut off
    addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(layer).items()}
    before, parts = layer.weight.data.clone(), packed_group(shapes, seed=1)
    targets = find_targets([(layer, list(QKV))], [nn.Linear(1, 1)])
    assert targets is not None
    names = SimpleNamespace(renamed=lambda name: f"hub.{name}")
    norm = torch.ones(2)
    stream = [("v", parts[2]), ("norm", norm), ("q", parts[0])]
    assert list(write_packed(stream, targets, names)) == [("hub.norm", norm)]
    assert torch.equal(layer.weight, before)
    assert list(write_packed([("k", parts[1])], targets, names)) == []
    assert_written(layer, marlin_linear(parts), addresses)


def own_rows(packed: PackedTensor, pieces: int, at: int) -> PackedTensor:
    codes, scale = (
        tensor.view(torch.uint8).chunk(pieces, -2)[at].contiguous()
        for tensor in (packed.codes, packed.block_scale)
    )
    return PackedTensor(codes, scale.view(torch.float8_e4m3fn), packed.global_scale)


def own_columns(packed: PackedTensor, pieces: int, at: int) -> PackedTensor:
    codes, scale = (
        tensor.view(torch.uint8).chunk(pieces, -1)[at].contiguous()
        for tensor in (packed.codes, packed.block_scale)
    )
    return PackedTensor(codes, scale.view(torch.float8_e4m3fn), packed.global_scale)


@pytest.mark.parametrize("rank", range(4))
def test_a_worker_of_four_is_written_its_heads_alone(rank: int) -> None:
    """Of two heads of keys and values each serves two workers."""
    shapes = [(256, HIDDEN), (128, HIDDEN), (128, HIDDEN)]

    def served_of(seed: int) -> list[PackedTensor]:
        q, *kv = packed_group(shapes, seed)
        return [own_rows(q, 4, rank), *(own_rows(it, 2, rank // 2) for it in kv)]

    layer = marlin_linear(served_of(0), rank, workers=4)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(layer).items()}
    targets = find_targets([(layer, list(QKV))], [])
    assert targets is not None
    stream = zip(QKV, packed_group(shapes, 1), strict=True)
    assert list(write_packed(stream, targets, None)) == []
    assert_written(layer, marlin_linear(served_of(1)), addresses)


@pytest.mark.parametrize("rank", range(2))
def test_a_worker_of_two_is_written_its_columns_alone(rank: int) -> None:
    layer = marlin_linear([own_columns(packed_group([(128, HIDDEN)], 0)[0], 2, rank)], rank, 2)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(layer).items()}
    targets = find_targets([(layer, ["o"])], [])
    assert targets is not None
    (packed,) = packed_group([(128, HIDDEN)], 1)
    targets["o"].take("o", packed)
    assert_written(layer, marlin_linear([own_columns(packed, 2, rank)]), addresses)


def packed_experts(seed: int, inner: int = INNER) -> list[PackedTensor]:
    shapes = [(EXPERTS, 2 * inner, HIDDEN), (EXPERTS, HIDDEN, inner)]
    return [packed_group([shape], seed)[0] for shape in shapes]


def assert_experts_written(layer: Any, expected: Any, inner: int = INNER) -> None:
    addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(layer).items()}
    targets = find_targets([(layer, EXPERT_NAMES)], [])
    assert targets is not None
    list(write_packed(zip(EXPERT_NAMES, packed_experts(1, inner), strict=True), targets, None))
    assert_written(layer, expected, addresses)


def test_experts_are_written_matrix_by_matrix() -> None:
    assert_experts_written(marlin_experts(*packed_experts(0)), marlin_experts(*packed_experts(1)))


@pytest.mark.parametrize("rank", range(2))
def test_a_worker_of_two_is_written_its_part_of_each_expert(rank: int) -> None:
    def served_of(seed: int) -> list[PackedTensor]:
        w13, w2 = packed_experts(seed, 2 * INNER)
        gate, up = (own_rows(own_rows(w13, 2, at), 2, rank) for at in range(2))
        codes, scale = (
            torch.cat([getattr(it, kind).view(torch.uint8) for it in (gate, up)], 1)
            for kind in ("codes", "block_scale")
        )
        own = PackedTensor(codes, scale.view(torch.float8_e4m3fn), w13.global_scale)
        return [own, own_columns(w2, 2, rank)]

    w13, w2 = served_of(0)
    layer = marlin_experts(w13, w2, rank, workers=2)
    assert_experts_written(layer, marlin_experts(*served_of(1)), 2 * INNER)


@pytest.mark.parametrize("own", [[0, 1], [2, 3], [1, 3]])
def test_an_expert_parallel_worker_is_written_its_experts_alone(own: list[int]) -> None:
    def served_of(seed: int) -> list[PackedTensor]:
        return [
            PackedTensor(it.codes[own], it.block_scale[own], it.global_scale[own])
            for it in packed_experts(seed)
        ]

    w13, w2 = served_of(0)
    layer = marlin_experts(w13, w2, workers=2, own=own)
    assert_experts_written(layer, marlin_experts(*served_of(1)))


class Attention(nn.Module):
    """As vLLM 0.24's on CUDA, whose scales of the KV cache no stream brings."""

    def __init__(self) -> None:
        super().__init__()
        self._k_scale = nn.Parameter(torch.ones(()), requires_grad=False)


class Served(nn.Module):
    """A fused linear in NVFP4, beside what vLLM's loader loads: a norm, and an output head."""

    def __init__(self, skipped: str = "") -> None:
        super().__init__()
        self.qkv = marlin_linear(packed_group([(r, HIDDEN) for r in QKV.values()], 0))
        self.qkv.bias = nn.Parameter(torch.zeros(sum(QKV.values())))
        self.norm, self.embedding = nn.LayerNorm(HIDDEN, bias=False), nn.Embedding(8, HIDDEN)
        self.attn = Attention()
        self.head = nn.Linear(HIDDEN, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.skipped = skipped

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return {name for name, _ in weights if name != self.skipped}


BESIDE = ["norm.weight", "embedding.weight", "qkv.bias"]


def take(model: Served, targets: dict[str, Target], seed: int, order: str) -> None:
    parts = dict(zip(QKV, packed_group([(r, HIDDEN) for r in QKV.values()], seed), strict=True))
    names: Any = SimpleNamespace(renamed=lambda name: name)
    with writing(model, targets, names) as write:
        write([(name, torch.ones(1)) for name in BESIDE])
        write([(name, parts[name]) for name in order])


@pytest.mark.parametrize("skipped", BESIDE)
def test_a_parameter_that_the_loader_skips_is_named(skipped: str) -> None:
    model = Served(skipped)
    targets = dict.fromkeys(QKV, Target(list(QKV), model.qkv, own_of_linear, write_marlin))
    with pytest.raises(ValueError, match=f"^weight sync: {skipped} got no new values in vLLM's S"):
        take(model, targets, 1, "qkv")


def test_a_sync_after_one_that_broke_off_writes_its_own_weights_alone() -> None:
    model = Served()
    target = Target(list(QKV), model.qkv, own_of_linear, write_marlin)
    targets = dict.fromkeys(QKV, target)
    take(model, targets, 1, "q")
    take(model, targets, 2, "vkq")
    expected = marlin_linear(packed_group([(r, HIDDEN) for r in QKV.values()], 2))
    assert torch.equal(model.qkv.weight, expected.weight)


def _with_bias() -> Any:
    layer = marlin_linear(packed_group([(128, HIDDEN)], 0))
    layer.bias = nn.Parameter(torch.zeros(128))
    return [(layer, ["o"])], []


def _with_padding() -> Any:
    layer = marlin_linear(packed_group([(128, HIDDEN)], 0))
    layer.weight = nn.Parameter(layer.weight.data.repeat(2, 1), requires_grad=False)
    return [(layer, ["o"])], []


def _with_another_kernel() -> Any:
    layer = marlin_linear(packed_group([(128, HIDDEN)], 0))
    layer.scheme = SimpleNamespace(kernel=object())
    return [(layer, ["o"])], []


def _with_bf16_experts() -> Any:
    experts: Any = nn.Module()
    experts.quant_method = type("UnquantizedFusedMoEMethod", (), {})()
    return [(marlin_linear(packed_group([(128, HIDDEN)], 0)), ["o"])], [experts]


def _with_a_layer_that_derives_weights() -> Any:
    class Derives(nn.Module):
        def process_weights_after_loading(self) -> None: ...

    return [(marlin_linear(packed_group([(128, HIDDEN)], 0)), ["o"])], [Derives()]


@pytest.mark.parametrize(
    "make",
    [
        _with_bias,
        _with_padding,
        _with_another_kernel,
        _with_bf16_experts,
        _with_a_layer_that_derives_weights,
    ],
)
def test_a_model_with_an_unknown_layer_keeps_to_the_reload(make: Any) -> None:
    assert find_targets(*make()) is None


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_an_engine_holds_the_same_bytes_as_after_a_reload(shape: str, tmp_path: Path) -> None:
    assert call_in_subprocess(_bytes_differ, shape, str(tmp_path)) == []


def _bytes_differ(shape: str, folder: str) -> list[str]:
    """Names of tensors that differ after syncs of the same weights by reload and in place."""
    recipe, path = Recipe.full(), Path(folder) / "model"
    write_architecture(ARCHITECTURES[shape] | {"num_hidden_layers": 2}, path)
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = meta_model(path).to_empty(device="cuda")
        for parameter in model.parameters():
            parameter.data.normal_(std=0.02 * 4**seed)
        models.append(model)
    planned = plan(models[0], recipe)
    engine = VllmEngine(path, planned, load_format="dummy", **engine_settings("cuda", 4))
    held = []
    for way, model in (("0", models[0]), ("1", models[1]), ("0", models[1])):
        os.environ[VARIABLE] = way
        engine.sync(weight_stream(model, planned, recipe), planned)
        held.append(engine.on_worker(_all_tensors))
    assert engine.on_worker(_written_in_place) == set(planned.quantized)
    _, in_place, reloaded = held
    return [
        name
        for name, tensor in reloaded.items()
        if not torch.equal(tensor.view(torch.uint8), in_place[name].view(torch.uint8))
    ]


def _written_in_place(worker: Any) -> set[str]:
    return set(worker.qat_core_targets)


def _all_tensors(worker: Any) -> dict[str, Tensor]:
    return {
        f"{prefix}.{name}": tensor.data.flatten().clone()
        for prefix, module in worker.model_runner.get_model().named_modules()
        for name, tensor in {**vars(module), **module._parameters, **module._buffers}.items()
        if isinstance(tensor, Tensor) and name != "kv_cache" and tensor.numel()
    }
