"""Weights that arrive in buckets, in a real vLLM worker on a CPU; experts loaded whole into layers
that act as vLLM 0.24's do.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import reload

from qat_core.exact.contract import CONTRACT_NAME, to_tensor
from qat_core.nvfp4 import PackedTensor, global_scale, group_amax, quantize
from qat_core.planning.plan import QuantPlan, plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.vllm import plugin
from qat_core.rollout.vllm.bucketed_loader import BucketedLoader
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.rollout.vllm.experts import loading_experts_whole
from qat_core.rollout.vllm.switches import EXACT_VARIABLE
from qat_core.rollout.vllm.worker import _loading_experts
from qat_core.weights.hub_names import HubNames
from qat_core.weights.stream import weight_stream
from qat_core.weights.transfer import transfer_tensors
from tests.nano_models import SETTINGS, write_nano

PROMPTS = [[3, 14, 4, 17], [5, 17]] * 4
Bucket = list[tuple[str, Tensor]]
Spoil = Callable[[Bucket], Bucket]
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A dense layer, and one of experts."""
    path = tmp_path_factory.mktemp("mixed") / "model"
    write_nano("nano-moe", path, num_layers=2, mlp_only_layers=[0])
    yield path
    cleanup_dist_env_and_memory()  # a MoE model needs other process groups than a dense one


@pytest.fixture(scope="module")
def model(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def packed(model: nn.Module) -> QuantPlan:
    return plan(model, Recipe())


@pytest.fixture(scope="module")
def engines(folder: Path, model: nn.Module, packed: QuantPlan) -> dict[str, VllmEngine]:
    of_nvfp4 = VllmEngine(folder, packed, **SETTINGS)
    of_nvfp4.sync(weight_stream(model, packed, Recipe()))  # without weights it does not generate
    return {"nvfp4": of_nvfp4, "bf16": VllmEngine(folder, **SETTINGS)}


def _receive(worker: Any, buckets: list[Bucket]) -> int:
    with BucketedLoader(worker) as loader:
        for bucket in buckets:
            loader.take(bucket)
            for _, tensor in bucket:
                tensor.zero_()  # as a bucket that is used again
    return loader.held_bytes


def _with_plan(model: nn.Module, recipe: Recipe) -> Bucket:
    checked = plan(model, recipe)
    stream = transfer_tensors(checked, weight_stream(model, checked, recipe))
    return [(name, tensor.clone()) for name, tensor in stream]


def _hub_named(model: nn.Module) -> Bucket:
    """As verl's own engine streams a model: no plan, one matrix per expert."""
    weights = HubNames(model).split(weight_stream(model, None, None))
    return [(name, weight.clone()) for name, weight in weights if isinstance(weight, Tensor)]


def _cut(tensors: Bucket) -> list[Bucket]:
    return [tensors[start : start + 4] for start in range(0, len(tensors), 4)]


def _without(part: str) -> Spoil:
    return lambda tensors: [(name, tensor) for name, tensor in tensors if part not in name]


def _with_short_norm(tensors: Bucket) -> Bucket:
    short = torch.ones(3, dtype=torch.bfloat16)
    return [(name, short if name == NORM else tensor) for name, tensor in tensors]


def _broken_off(tensors: Bucket) -> Bucket:
    """Within a packed weight."""
    codes = next(i for i, (name, _) in enumerate(tensors) if name.endswith(":codes"))
    return tensors[: codes + 1]


def _log_probs(engine: VllmEngine) -> Tensor:
    return engine.generate(PROMPTS, max_new_tokens=8, temperature=1.0, seed=0).log_probs


@pytest.mark.long
def test_buckets_load_what_a_sync_loads(
    engines: dict[str, VllmEngine], model: nn.Module, packed: QuantPlan
) -> None:
    engine = engines["nvfp4"]
    engine.sync(weight_stream(model, packed, Recipe()))
    synced = _log_probs(engine)
    with torch.no_grad():
        for parameter in (other := type(model)(model.config).bfloat16()).parameters():
            parameter.normal_(std=0.05)
    engine.sync(weight_stream(other, packed, Recipe()))
    assert not torch.equal(_log_probs(engine), synced)
    held_bytes = engine.on_worker(_receive, _cut(_with_plan(model, Recipe())))
    stream = weight_stream(model, packed, Recipe())
    assert held_bytes == sum(weight.nbytes for _, weight in stream)
    assert torch.equal(_log_probs(engine), synced)


STREAMS: dict[str, Callable[[nn.Module], Bucket]] = {
    "nvfp4": lambda model: _with_plan(model, Recipe()),
    "bf16": _hub_named,
}


def _of_another_recipe(model: nn.Module) -> Bucket:
    return _with_plan(model, Recipe.ffn())


@pytest.mark.long
@pytest.mark.parametrize(
    ("served", "sent", "message"),
    [
        ("nvfp4", _of_another_recipe, "8 weights come in BF16 but are served in NVFP4"),
        # from verl's own engine, in place of the one that `+nvfp4=w4a16` configures
        ("nvfp4", _hub_named, r"without a plan, but \d+ weights are served in NVFP4"),
        ("bf16", STREAMS["nvfp4"], r"\d+ weights come packed but are served in BF16"),
    ],
    ids=["another recipe", "no plan", "packed for bf16"],
)
def test_what_is_served_otherwise_is_refused_and_the_old_weights_served(
    engines: dict[str, VllmEngine],
    model: nn.Module,
    served: str,
    sent: Callable[[nn.Module], Bucket],
    message: str,
) -> None:
    engine = engines[served]
    engine.on_worker(_receive, _cut(STREAMS[served](model)))
    before = _log_probs(engine)
    with pytest.raises(ValueError, match=message):
        engine.on_worker(_receive, _cut(sent(model)))
    assert torch.equal(_log_probs(engine), before)


@pytest.mark.long
@pytest.mark.parametrize(
    ("served", "spoil", "message"),
    [
        ("nvfp4", _without(NORM), f"1 weights missing: {NORM}"),
        ("nvfp4", _with_short_norm, rf"{NORM} came as .*\(3,\), not as .*\(128,\)"),
        ("nvfp4", _broken_off, "without all its parts"),
        # without a plan
        ("bf16", lambda tensors: [], "no weight came"),
        ("bf16", _without(NORM), f"{NORM} got no new values"),
    ],
    ids=["missing", "shape", "broken off", "no plan: nothing", "no plan: missing"],
)
def test_what_is_not_all_that_is_served_is_refused_and_a_later_sync_loads(
    engines: dict[str, VllmEngine], model: nn.Module, served: str, spoil: Spoil, message: str
) -> None:
    engine, sent = engines[served], STREAMS[served]
    engine.on_worker(_receive, _cut(sent(model)))
    before = _log_probs(engine)
    with pytest.raises(ValueError, match=message):
        engine.on_worker(_receive, _cut(spoil(sent(model))))
    engine.on_worker(_receive, _cut(sent(model)))
    assert torch.equal(_log_probs(engine), before)


LAYERS, EXPERTS, HIDDEN, INNER = 3, 2, 32, 16
SHAPES = {"w13": (EXPERTS, 2 * INNER, HIDDEN), "w2": (EXPERTS, HIDDEN, INNER)}
NAMES = {"w13": "gate_up_proj", "w2": "down_proj"}


class NamedAsHere:
    """The hub's names, where they are the trainer's."""

    @staticmethod
    def experts_at(prefix: str) -> list[str]:
        return [f"{prefix}.{leaf}" for leaf in NAMES.values()]

    @staticmethod
    def expert_prefix(name: str) -> str:
        return name.rpartition(".")[0]


HUB_NAMES = NamedAsHere()


class Method(QuantizeMethodBase):
    """Binds its kernel to new tensors, before the reload has copied them to where they are kept."""

    def create_weights(self, layer: nn.Module, *_: object, **__: object) -> None:
        for matrix, (experts, rows, columns) in SHAPES.items():
            tensors = {
                "weight_packed": torch.zeros(experts, rows, columns // 2, dtype=torch.uint8),
                "weight_scale": torch.zeros(experts, rows, columns // 16).to(torch.float8_e4m3fn),
                "weight_global_scale": torch.zeros(experts, 2 if matrix == "w13" else 1).squeeze(1),
                "input_global_scale": torch.zeros(experts, 2 if matrix == "w13" else 1).squeeze(1),
            }
            for name, tensor in tensors.items():
                parameter = nn.Parameter(tensor, requires_grad=False)
                parameter.weight_loader = None  # type: ignore[attr-defined]
                layer.register_parameter(f"{matrix}_{name}", parameter)

    def apply(self, *_: object, **__: object) -> Tensor:
        raise AssertionError("not called here")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        for matrix in SHAPES:
            scale = getattr(layer, f"{matrix}_weight_scale").data.clone()
            setattr(layer, f"{matrix}_weight_scale", nn.Parameter(scale, requires_grad=False))
        config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = SimpleNamespace(fused_experts=SimpleNamespace(quant_config=config))

    def get_fused_moe_quant_config(self, layer: nn.Module) -> SimpleNamespace:
        return SimpleNamespace(w13=layer.w13_weight_scale, w2=layer.w2_weight_scale)


@pytest.fixture
def experts_model() -> nn.Module:
    model = nn.Module()
    for index in range(LAYERS):
        layer = nn.Module()
        layer.quant_method = Method()
        parallel = SimpleNamespace(tp_rank=0, tp_size=1, ep_size=1)
        layer.moe_config = SimpleNamespace(moe_parallel_config=parallel)
        layer.quant_method.create_weights(layer)
        model.add_module(f"{index}", nn.ModuleDict({"experts": layer}))
    reload.record_metadata_for_reloading(model)
    for layer in (module["experts"] for module in model.children()):
        layer.quant_method.process_weights_after_loading(layer)
    return model


def _packed_experts() -> Iterator[tuple[str, PackedTensor]]:
    torch.manual_seed(0)
    for index in range(LAYERS):
        for matrix, shape in SHAPES.items():
            weight = torch.randn(shape, dtype=torch.bfloat16)
            (amax,) = group_amax([[weight]])
            yield f"{index}.experts.{NAMES[matrix]}", quantize(weight, global_scale(amax))


def test_kernels_read_the_kept_scales_as_soon_as_a_layer_is_loaded(
    experts_model: nn.Module,
) -> None:
    layers = [module["experts"] for module in experts_model.children()]
    kept = [(layer.w13_weight_scale, layer.w2_weight_scale) for layer in layers]
    sent = list(_packed_experts())
    with loading_experts_whole(experts_model, HUB_NAMES) as experts:
        reload.initialize_layerwise_reload(experts_model)
        for index, layer in enumerate(layers):
            assert not list(_loading_experts(sent[2 * index : 2 * index + 2], experts, HUB_NAMES))
            config = layer.quant_method.moe_kernel.fused_experts.quant_config
            assert config.w13 is kept[index][0] and config.w2 is kept[index][1]
            for scale, (_, weight) in zip(kept[index], sent[2 * index :], strict=False):
                assert torch.equal(scale.view(torch.uint8), weight.block_scale.view(torch.uint8))


def test_a_worker_without_the_plugin_says_so_before_each_entry_of_the_contract_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(EXACT_VARIABLE, "1")
    monkeypatch.setattr(plugin, "_is_loaded", False)
    message = "^exact rollouts: vLLM's worker has not loaded"
    with pytest.raises(ValueError, match=message), BucketedLoader(None) as loader:
        loader.take([(CONTRACT_NAME, to_tensor({"norm": "other"}))])
