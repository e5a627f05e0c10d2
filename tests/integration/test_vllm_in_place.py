"""Weights written into the tensors of vLLM's kernels are those that its own preparation makes."""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin

from experiments.base.random_model import write_architecture
from experiments.benchmarks.architectures import ARCHITECTURES, engine_settings
from experiments.support.subprocess_call import call_in_subprocess
from qat_core.nvfp4 import PackedTensor
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.rollout.vllm.in_place.sync import write_packed, writing
from qat_core.rollout.vllm.in_place.targets import NotInPlace, Target, find_targets, write_marlin
from qat_core.rollout.vllm.shares import own_of_linear
from qat_core.rollout.vllm.switches import IN_PLACE_VARIABLE
from qat_core.rollout.vllm.tile_layout import marlin_scales
from qat_core.weights.stream import weight_stream
from tests.marlin_layers import (
    EXPERT_NAMES,
    HIDDEN,
    INNER,
    ON_GPU,
    QKV,
    all_tensors,
    assert_experts_written,
    assert_written,
    drawn,
    marlin_experts,
    marlin_linear,
    packed_experts,
    packed_group,
    prepare_for_marlin_on_a_cpu,
    tensors_of,
)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        prepare_for_marlin_on_a_cpu(monkeypatch)


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
    if hasattr(layer, "workspace"):  # of each layer up to vLLM 0.29
        layer.workspace.fill_(7)  # left by a kernel that was cut off
    addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(layer).items()}
    before, parts = layer.weight.data.clone(), packed_group(shapes, seed=1)
    targets = find_targets([(layer, list(QKV))], {"lm_head": nn.Linear(1, 1)})
    names = SimpleNamespace(renamed=lambda name: f"hub.{name}")
    norm = torch.ones(2)
    stream = [("v", parts[2]), ("norm", norm), ("q", parts[0])]
    assert list(write_packed(stream, targets, names)) == [("hub.norm", norm)]
    assert torch.equal(layer.weight, before)
    assert list(write_packed([("k", parts[1])], targets, names)) == []
    assert_written(layer, marlin_linear(parts), addresses)


# 192 is what each of four workers has of Qwen3-30B-A3B's 768.
@pytest.mark.parametrize("inner", [INNER, 192])
def test_experts_are_written_matrix_by_matrix(inner: int) -> None:
    layer, expected = (marlin_experts(*packed_experts(seed, inner)) for seed in range(2))
    assert_experts_written(layer, expected, inner)


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
        self.skipped, self.extra = skipped, list[tuple[str, Tensor]]()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded, parameters = set(), dict(self.named_parameters())
        for name, tensor in weights:
            if name != self.skipped:
                getattr(parameters[name], "weight_loader", _copy)(parameters[name], tensor)
                loaded.add(name)
        return loaded


def _copy(parameter: Tensor, loaded: Tensor) -> None:
    parameter.data.copy_(loaded)


BESIDE = ["norm.weight", "embedding.weight", "qkv.bias"]


def _targets(model: Served) -> dict[str, Target]:
    return dict.fromkeys(QKV, Target(list(QKV), model.qkv, own_of_linear, write_marlin))


def take(model: Served, targets: dict[str, Target], seed: int, order: str) -> None:
    parts = dict(zip(QKV, packed_group([(r, HIDDEN) for r in QKV.values()], seed), strict=True))
    names: Any = SimpleNamespace(renamed=lambda name: name)
    with writing(model, targets, names) as write:
        beside = {name: model.get_parameter(name).detach().clone() for name in BESIDE}
        write([*beside.items(), *model.extra])
        write([(name, parts[name]) for name in order])


@pytest.mark.parametrize("skipped", BESIDE)
def test_a_parameter_that_the_loader_skips_is_named(skipped: str) -> None:
    with pytest.raises(ValueError, match=f"^weight sync: {skipped} got no new values in vLLM's S"):
        take(model := Served(skipped), _targets(model), 1, "qkv")


def test_a_tensor_that_gets_to_no_parameter_is_named() -> None:
    model = Served(skipped="own_head.weight")
    model.extra = [("own_head.weight", torch.ones(8, HIDDEN))]
    with pytest.raises(ValueError, match=r"^weight sync: own_head\.weight: sent, but vLLM's Serv"):
        take(model, _targets(model), 1, "qkv")


def test_a_sync_after_one_that_broke_off_writes_its_own_weights_alone() -> None:
    model = Served()
    targets = _targets(model)
    take(model, targets, 1, "q")
    take(model, targets, 2, "vkq")
    expected = marlin_linear(packed_group([(r, HIDDEN) for r in QKV.values()], 2))
    assert torch.equal(model.qkv.weight, expected.weight)


def _linear(**changed: Any) -> Any:
    layer = marlin_linear(packed_group([(128, HIDDEN)], 0))
    vars(layer).update(changed)
    return layer


def _padded_experts() -> Any:
    _, w2 = packed_experts(0, 96)  # that vLLM pads to 128
    layer = marlin_experts(*packed_experts(0, 128))
    layer.intermediate_size_per_partition = w2.shape[2]
    return layer


class Derives(nn.Module):
    """Makes weights of its own of those that were loaded."""

    def process_weights_after_loading(self) -> None: ...


def _bf16_experts() -> Any:
    experts: Any = nn.Module()
    experts.quant_method = type("UnquantizedFusedMoEMethod", (), {})()
    return experts


@pytest.mark.parametrize(
    ("layer", "names", "others", "why"),
    [
        (
            lambda: _linear(bias=torch.zeros(1)),
            ["o"],
            {},
            "o: Marlin has its bias in another order",
        ),
        (lambda: _linear(output_size_per_partition=64), ["o"], {}, "o: padded for Marlin"),
        (_padded_experts, EXPERT_NAMES, {}, f"{', '.join(EXPERT_NAMES)}: padded for Marlin"),
        (lambda: _linear(scheme=None), ["o"], {}, "o: Module with a kernel that is not known"),
        (_linear, ["o"], {"mlp.experts": _bf16_experts()}, "mlp.experts: Module is not known"),
        (_linear, ["o"], {"attn": Derives()}, "attn: Derives is not known"),
        (_linear, [], {}, "Module holds none of the trainer's weights"),
    ],
)
def test_a_model_with_an_unknown_layer_is_not_written_in_place(
    layer: Callable[[], Any], names: list[str], others: dict[str, nn.Module], why: str
) -> None:
    with pytest.raises(NotInPlace, match=f"^{re.escape(why)}$"):
        find_targets([(layer(), names)], others)


@pytest.mark.parametrize("shape", [(256, HIDDEN), (128, 2 * HIDDEN), (192, HIDDEN), (64, HIDDEN)])
def test_a_weight_of_another_size_is_refused_by_name(shape: tuple[int, int]) -> None:
    layer = marlin_linear(packed_group([(128, HIDDEN)], 0))
    targets = find_targets([(layer, ["o"])], {})
    sizes = rf"\({shape[0]}, {shape[1]}\) is sent, \(128, {HIDDEN}\) served"
    with pytest.raises(ValueError, match=f"^weight sync: o: {sizes}: trainer and engine read"):
        targets["o"].take("o", packed_group([shape], 1)[0])


def test_other_experts_than_are_served_are_refused_by_name() -> None:
    targets = find_targets([(marlin_experts(*packed_experts(0)), EXPERT_NAMES)], {})
    gate_up, _ = EXPERT_NAMES
    w13, _ = packed_experts(1)
    scale = w13.block_scale.view(torch.uint8)
    twice = PackedTensor(*(torch.cat([it, it]) for it in (w13.codes, scale, w13.global_scale)))
    with pytest.raises(ValueError, match=rf"^weight sync: {gate_up}: \(8, .* sent, \(4, .* served"):
        targets[gate_up].take(gate_up, twice)


def test_a_weight_on_another_device_is_moved_to_the_layers() -> None:
    (packed,) = packed_group([(128, HIDDEN)], 0)
    assert packed.to(packed.codes.device) is packed
    moved = packed.to(torch.device("meta"))
    assert all(tensor.is_meta for tensor in vars(moved).values()) and moved.shape == packed.shape


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_an_engine_holds_the_same_bytes_as_after_a_reload(shape: str, tmp_path: Path) -> None:
    assert call_in_subprocess(_bytes_differ, shape, str(tmp_path)) == []


def _bytes_differ(shape: str, folder: str) -> list[str]:
    """Names of tensors that differ after syncs of the same weights by reload and in place.

    And after a sleep, which keeps no weights: of them alone, as nothing reads what else it leaves.
    """
    recipe, path = Recipe.full(), Path(folder) / "model"
    write_architecture(ARCHITECTURES[shape] | {"num_hidden_layers": 2}, path)
    models = [drawn(path, seed) for seed in range(2)]
    planned = plan(models[0], recipe)
    settings = engine_settings("cuda", 4) | {"enable_sleep_mode": True}
    engine = VllmEngine(path, planned, load_format="dummy", **settings)

    def synced(way: str, model: nn.Module) -> dict[str, Tensor]:
        os.environ[IN_PLACE_VARIABLE] = way
        engine.sync(weight_stream(model, planned, recipe), planned)
        return engine.on_worker(all_tensors)

    synced("0", models[0])
    in_place, reloaded = synced("1", models[1]), synced("0", models[1])
    engine.sleep()
    engine.wake_up()
    slept = {
        f"{it} after a sleep": of for it, of in synced("1", models[1]).items() if "weight" in it
    }
    assert engine.on_worker(_written_in_place) == set(planned.quantized)
    return [
        name
        for name, tensor in (reloaded | slept).items()
        if not torch.equal(tensor, in_place[name.removesuffix(" after a sleep")])
    ]


def _written_in_place(worker: Any) -> set[str]:
    return set(worker.qat_core_targets)
