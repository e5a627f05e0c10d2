"""Weights that arrive in buckets, in a real vLLM worker on a CPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.distributed import cleanup_dist_env_and_memory

from qat_core.planning.plan import QuantPlan, plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.vllm.bucketed_loader import BucketedLoader
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.weights.hub_names import HubNames
from qat_core.weights.stream import weight_stream
from qat_core.weights.transfer import transfer_tensors
from tests.nano_models import write_nano

pytestmark = pytest.mark.long

PROMPTS = [[3, 14, 4, 17], [5, 17]] * 4
SETTINGS: dict[str, Any] = {
    "max_model_len": 64,
    "kv_cache_memory_bytes": 2**26,
    "enforce_eager": True,
}
Bucket = list[tuple[str, Tensor]]
Spoil = Callable[[Bucket], Bucket]
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module", params=["nano-dense", "nano-moe"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    path = tmp_path_factory.mktemp(request.param) / "model"
    write_nano(request.param, path, num_layers=2)
    yield path
    cleanup_dist_env_and_memory()  # a MoE model needs other process groups than a dense one


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def packed(model: torch.nn.Module) -> QuantPlan:
    return plan(model, Recipe())


@pytest.fixture(scope="module")
def engine(folder: Path, packed: QuantPlan) -> VllmEngine:
    return VllmEngine(folder, packed, **SETTINGS)


@pytest.fixture(scope="module")
def bf16_engine(folder: Path) -> VllmEngine:
    return VllmEngine(folder, **SETTINGS)


def _receive(worker: Any, buckets: list[Bucket]) -> int:
    with BucketedLoader(worker) as loader:
        for bucket in buckets:
            loader.take(bucket)
            for _, tensor in bucket:
                tensor.zero_()  # as a bucket that is used again
    return loader.held_bytes


def _with_plan(model: torch.nn.Module, checked: QuantPlan, recipe: Recipe) -> Bucket:
    stream = transfer_tensors(checked, weight_stream(model, checked, recipe))
    return [(name, tensor.clone()) for name, tensor in stream]


def _hub_named(model: torch.nn.Module) -> Bucket:
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


def _with_one_again(tensors: Bucket) -> Bucket:
    return [*tensors, tensors[-1]]


def _log_probs(engine: VllmEngine) -> Tensor:
    return engine.generate(PROMPTS, max_new_tokens=8, temperature=1.0, seed=0).log_probs


def test_buckets_load_what_a_sync_loads(
    engine: VllmEngine, model: torch.nn.Module, packed: QuantPlan
) -> None:
    engine.sync(weight_stream(model, packed, Recipe()))
    synced = _log_probs(engine)
    with torch.no_grad():
        for parameter in (other := type(model)(model.config).bfloat16()).parameters():
            parameter.normal_(std=0.05)
    engine.sync(weight_stream(other, packed, Recipe()))
    assert not torch.equal(_log_probs(engine), synced)
    held_bytes = engine.on_worker(_receive, _cut(_with_plan(model, packed, Recipe())))
    stream = weight_stream(model, packed, Recipe())
    assert held_bytes == sum(weight.nbytes for _, weight in stream)
    assert torch.equal(_log_probs(engine), synced)


def test_weights_packed_otherwise_are_refused_and_the_old_ones_served(
    engine: VllmEngine, model: torch.nn.Module, packed: QuantPlan
) -> None:
    engine.sync(weight_stream(model, packed, Recipe()))
    before = _log_probs(engine)
    ffn = plan(model, Recipe.ffn())
    with pytest.raises(ValueError, match="8 weights come in BF16 but are served in NVFP4"):
        engine.on_worker(_receive, _cut(_with_plan(model, ffn, Recipe.ffn())))
    assert torch.equal(_log_probs(engine), before)


def test_packed_weights_for_an_engine_of_bf16_are_refused_and_the_old_ones_served(
    bf16_engine: VllmEngine, model: torch.nn.Module, packed: QuantPlan
) -> None:
    bf16_engine.sync(weight_stream(model, None, None))
    before = _log_probs(bf16_engine)
    with pytest.raises(ValueError, match=r"\d+ weights come packed but are served in BF16"):
        bf16_engine.on_worker(_receive, _cut(_with_plan(model, packed, Recipe())))
    assert torch.equal(_log_probs(bf16_engine), before)


def test_bf16_weights_without_a_plan_are_refused_and_the_old_ones_served(
    engine: VllmEngine, model: torch.nn.Module, packed: QuantPlan
) -> None:
    """As verl's own engine would send them, in place of the one that `+nvfp4=w4a16` configures."""
    engine.sync(weight_stream(model, packed, Recipe()))
    before = _log_probs(engine)
    with pytest.raises(ValueError, match=r"without a plan, but \d+ weights are served in NVFP4"):
        engine.on_worker(_receive, _cut(_hub_named(model)))
    assert torch.equal(_log_probs(engine), before)


def test_a_stream_that_breaks_off_is_named(
    engine: VllmEngine, model: torch.nn.Module, packed: QuantPlan
) -> None:
    buckets = _cut(_with_plan(model, packed, Recipe()))
    cut = next(i for i, bucket in enumerate(buckets) if not bucket[-1][0].endswith("global_scale"))
    with pytest.raises(ValueError, match="without all its parts"):
        engine.on_worker(_receive, buckets[: cut + 1])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without("1.mlp"), r"weights missing: model\.layers\.1\.mlp"),
        (_without(NORM), f"1 weights missing: {NORM}"),
        (_with_one_again, "came before"),
        (_with_short_norm, rf"{NORM} came as .*\(3,\), not as .*\(128,\)"),
    ],
    ids=["missing-mlp", "missing-norm", "twice", "shape"],
)
def test_what_differs_from_its_plan_is_refused_and_a_later_sync_loads(
    engine: VllmEngine, model: torch.nn.Module, packed: QuantPlan, spoil: Spoil, message: str
) -> None:
    engine.sync(weight_stream(model, packed, Recipe()))
    before = _log_probs(engine)
    with pytest.raises(ValueError, match=message):
        engine.on_worker(_receive, _cut(spoil(_with_plan(model, packed, Recipe()))))
    engine.on_worker(_receive, _cut(_with_plan(model, packed, Recipe())))
    assert torch.equal(_log_probs(engine), before)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_with_one_again, "came before"),
        (lambda tensors: [], "no weight came"),
        (_without(NORM), f"{NORM} got no new values"),
    ],
    ids=["twice", "nothing", "missing"],
)
def test_a_wrong_stream_without_plan_is_refused(
    bf16_engine: VllmEngine, model: torch.nn.Module, spoil: Spoil, message: str
) -> None:
    bf16_engine.sync(weight_stream(model, None, None))
    before = _log_probs(bf16_engine)
    with pytest.raises(ValueError, match=message):
        bf16_engine.on_worker(_receive, _cut(spoil(_hub_named(model))))
    bf16_engine.on_worker(_receive, _cut(_hub_named(model)))
    assert torch.equal(_log_probs(bf16_engine), before)
