"""vLLM at true model size with random weights: weight memory and weight sync.

    python -m experiments.benchmarks rollout experiments/records/benchmarks/rollout_h200.json \\
        qwen3-30b-a3b:nvfp4 qwen3-8b:nvfp4 qwen3-30b-a3b:bf16 qwen3-8b:bf16

What is measured the note in `engine_tables` says. The extra memory of a sync is the peak over what
was allocated before it, the trainer's weights and the KV cache included. vLLM's own load is, as by
verl, of every tensor, of experts every matrix. vLLM measures its weight memory by what PyTorch's
allocator has given out, gaps included; with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True there
are none. `--device cpu` rehearses with the nano models.
"""

import argparse
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from experiments.base.random_model import write_architecture
from experiments.benchmarks.architectures import engine_settings
from experiments.benchmarks.engines import read_engine, record_engines
from experiments.benchmarks.timing import synchronize
from qat_core.checkpoint.architecture import meta_model
from qat_core.planning.plan import plan
from qat_core.planning.predicted_memory import predict_weight_memory_gib, weight_shapes
from qat_core.planning.recipe import Recipe
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.rollout.vllm.switches import IN_PLACE_VARIABLE
from qat_core.units import BYTES_PER_GIB
from qat_core.weights.hub_names import HubNames
from qat_core.weights.stream import weight_stream

SYNCS = 5
MAX_NUM_SEQS = 32


def run(name: str, device: str) -> dict[str, Any]:
    """All figures of one `model:precision`."""
    config, is_packed = read_engine(name)
    recipe = Recipe.full() if is_packed else None
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        write_architecture(config, folder)
        trained = _random_weights(meta_model(folder), device)
        served = plan(trained, recipe) if recipe else None
        gaps_gib = _allocator_gaps_gib(device)
        engine = VllmEngine(
            folder, served, load_format="dummy", **engine_settings(device, MAX_NUM_SEQS)
        )
        memory = _memory(engine, config, "full" if recipe else "bf16")
        if device == "cuda":
            memory["allocator_gaps_gib"] = _allocator_gaps_gib(device) - gaps_gib
        os.environ[IN_PLACE_VARIABLE] = "0"
        figures: dict[str, Any] = {"memory": memory}
        figures["syncs"] = _measure(_sync, engine, trained, recipe)
        if recipe:
            figures["packing"] = _measure(_pack, engine, trained, recipe)
        if device == "cuda" and recipe:
            os.environ[IN_PLACE_VARIABLE] = "1"
            figures["in_place_syncs"] = _measure(_sync, engine, trained, recipe)
            if not engine.on_worker(writes_in_place):
                raise ValueError(f"{name}: {IN_PLACE_VARIABLE}=1 was set, and vLLM reloaded")
        elif device == "cuda":
            figures["stock_syncs"] = _measure(engine.on_worker, _load_weights, trained)
    return figures


@torch.no_grad()
def _random_weights(model: nn.Module, device: str) -> nn.Module:
    model = model.to_empty(device=device)
    for parameter in model.parameters():
        parameter.normal_(std=0.02)
    return model


def _memory(engine: VllmEngine, config: dict[str, Any], precision: Any) -> dict[str, float]:
    """What vLLM reports, what its tensors take, and what shapes predict of the latter."""
    weights_gib = predict_weight_memory_gib(config, precision)
    rotary_gib = 2 * config["max_position_embeddings"] * config["head_dim"] / BYTES_PER_GIB
    figures = {
        "reported_gib": engine.weight_bytes / BYTES_PER_GIB,
        "tensors_gib": engine.tensor_bytes / BYTES_PER_GIB,
        "predicted_weights_gib": weights_gib,
        "predicted_rotary_cache_gib": rotary_gib,
        "layer_gib": _layer_bytes(config) / BYTES_PER_GIB,
    }
    predicted = weights_gib + rotary_gib
    figures["predicted_over_tensors"] = predicted / figures["tensors_gib"] - 1
    return figures


def _allocator_gaps_gib(device: str) -> float:
    """What PyTorch's allocator has given out beyond what was asked of it; 0 on a CPU."""
    if device == "cpu":
        return 0.0
    stats = torch.cuda.memory_stats()
    gaps: int = stats["allocated_bytes.all.current"] - stats["requested_bytes.all.current"]
    return gaps / BYTES_PER_GIB


def _layer_bytes(config: dict[str, Any]) -> int:
    """One decoder layer in BF16: the bound that a sync's extra memory is held against."""
    shapes = weight_shapes(config).items()
    return sum(2 * math.prod(shape) for name, shape in shapes if ".layers.0." in name)


def _sync(engine: VllmEngine, trained: nn.Module, recipe: Recipe | None) -> None:
    planned = plan(trained, recipe) if recipe else engine.plan
    engine.sync(weight_stream(trained, planned if recipe else None, recipe), planned)


def _pack(engine: VllmEngine, trained: nn.Module, recipe: Recipe) -> None:
    for _ in weight_stream(trained, engine.plan, recipe):
        pass


def _load_weights(worker: Any, trained: nn.Module) -> None:
    weights = ((name, p.detach()) for name, p in trained.named_parameters())
    worker.model_runner.get_model().load_weights(HubNames(trained).split(weights))


def _measure(call: Callable[..., object], *arguments: object) -> dict[str, list[float]]:
    """Seconds and, on CUDA, peak extra memory of each of SYNCS calls, and what they left."""
    rows = [_measure_once(call, *arguments) for _ in range(SYNCS)]
    return {name: [row[name] for row in rows] for name in rows[0]}


def _measure_once(call: Callable[..., object], *arguments: object) -> dict[str, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize(device)
    before = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = perf_counter()
    call(*arguments)
    synchronize(device)
    figures = {"seconds": perf_counter() - start}
    if device == "cuda":
        figures["extra_gib"] = (torch.cuda.max_memory_allocated() - before) / BYTES_PER_GIB
        figures["left_gib"] = (torch.cuda.memory_allocated() - before) / BYTES_PER_GIB
    return figures


def writes_in_place(worker: Any) -> bool:
    """Whether the last sync went past vLLM's reload; runs in its worker."""
    return bool(getattr(worker, "qat_core_targets", {}))


def main(arguments: argparse.Namespace) -> None:
    """Measures each `model:precision` and writes the record after each."""
    settings = {"allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")}
    record_engines(arguments, "rollout", settings, run)
