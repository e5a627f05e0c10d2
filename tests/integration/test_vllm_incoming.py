"""Weights that arrive in buckets, in a real vLLM worker on a CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from vllm.distributed import cleanup_dist_env_and_memory

from qat_core.plan import QuantPlan, plan
from qat_core.recipe import Recipe
from qat_core.rollout.packed import weight_stream
from qat_core.rollout.vllm import VllmEngine
from qat_core.rollout.vllm_incoming import IncomingWeights
from qat_core.rollout.wire import to_wire
from tests.nano_models import write_nano

pytestmark = pytest.mark.slow

PROMPTS = [[3, 14, 4, 17], [5, 17]] * 4
Bucket = list[tuple[str, Tensor]]


@pytest.fixture(scope="module", params=["nano-dense", "nano-moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / "model"
    write_nano(request.param, path, num_layers=2)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def packed(model: torch.nn.Module) -> QuantPlan:
    return plan(model, Recipe())


@pytest.fixture(scope="module")
def engine(folder: Path, packed: QuantPlan) -> Iterator[VllmEngine]:
    settings: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 2**26}
    yield VllmEngine(folder, packed, enforce_eager=True, **settings)
    cleanup_dist_env_and_memory()


def _receive(worker: Any, buckets: list[Bucket]) -> int:
    with IncomingWeights(worker) as incoming:
        for bucket in buckets:
            incoming.take(bucket)
            for _, tensor in bucket:
                tensor.zero_()  # as a bucket that is used again
    return incoming.held_bytes


def _buckets(model: torch.nn.Module, checked: QuantPlan, recipe: Recipe) -> list[Bucket]:
    tensors = [
        (name, tensor.clone())
        for name, tensor in to_wire(checked, weight_stream(model, checked, recipe))
    ]
    return [tensors[start : start + 4] for start in range(0, len(tensors), 4)]


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
    held_bytes = engine.on_worker(_receive, _buckets(model, packed, Recipe()))
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
        engine.on_worker(_receive, _buckets(model, ffn, Recipe.ffn()))
    assert torch.equal(_log_probs(engine), before)


def test_a_stream_that_breaks_off_is_named(
    engine: VllmEngine, model: torch.nn.Module, packed: QuantPlan
) -> None:
    buckets = _buckets(model, packed, Recipe())
    cut = next(i for i, bucket in enumerate(buckets) if not bucket[-1][0].endswith("global_scale"))
    with pytest.raises(ValueError, match="without all its parts"):
        engine.on_worker(_receive, buckets[: cut + 1])
