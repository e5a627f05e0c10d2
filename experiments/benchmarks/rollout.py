"""vLLM at true model size with random weights: weight memory, weight sync, decode throughput.

    python -m experiments.benchmarks.rollout experiments/records/benchmarks/rollout_h200.json \\
        qwen3-8b:nvfp4 qwen3-8b:bf16 qwen3-30b-a3b:nvfp4

Every engine is synced from a BF16 model on the same GPU, as in training. The extra memory of a sync
is the peak over what was allocated before it, the trainer's weights and the KV cache included.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import nn

from experiments.benchmarks.random_model import write_architecture
from experiments.provenance import hardware, versions
from experiments.schema import ROOT
from qat_core.checkpoint.architecture import meta_model
from qat_core.memory import predict_weight_memory_gib
from qat_core.plan import plan
from qat_core.recipe import Recipe
from qat_core.rollout.packed import weight_stream
from qat_core.rollout.vllm import VllmEngine, vllm_version

BYTES_PER_GIB = 2**30
SYNCS = 3
BATCHES = (1, 32, 256)
PROMPT_TOKENS, NEW_TOKENS = 32, 128
KV_CACHE_GIB = 16


def run(model_name: str, precision: str) -> dict[str, Any]:
    """All figures of one model in one precision."""
    config = json.loads((ROOT / "experiments" / "models" / f"{model_name}.json").read_text())
    recipe = Recipe.full() if precision == "nvfp4" else None
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        write_architecture(config, folder)
        trained = _random_weights(meta_model(folder))
        served = plan(trained, recipe) if recipe else None
        start = perf_counter()
        engine = VllmEngine(
            folder,
            served,
            load_format="dummy",
            max_model_len=1024,
            max_num_seqs=max(BATCHES),
            gpu_memory_utilization=0.3,  # only checked against free memory
            kv_cache_memory_bytes=KV_CACHE_GIB * BYTES_PER_GIB,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        )
        figures: dict[str, Any] = {"start_s": perf_counter() - start}
        figures["weight_gib"] = engine.weight_bytes / BYTES_PER_GIB
        predicted = predict_weight_memory_gib(config, "full" if recipe else "bf16")
        figures["predicted_weight_gib"] = predicted
        figures["kv_cache_tokens"] = engine.kv_cache_tokens
        figures["syncs"] = [_sync(engine, trained, recipe) for _ in range(SYNCS)]
        figures["decode"] = {str(batch): _decode(engine, batch) for batch in BATCHES}
    return figures


@torch.no_grad()
def _random_weights(model: nn.Module) -> nn.Module:
    model = model.to_empty(device="cuda")
    for parameter in model.parameters():
        parameter.normal_(std=0.02)
    return model


def _sync(engine: VllmEngine, trained: nn.Module, recipe: Recipe | None) -> dict[str, float]:
    announced = plan(trained, recipe) if recipe else engine.plan
    with _measured() as figures:
        engine.sync(weight_stream(trained, announced if recipe else None, recipe), announced)
    return figures


@contextmanager
def _measured() -> Iterator[dict[str, float]]:
    """Seconds and peak extra memory of what runs inside."""
    figures: dict[str, float] = {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), perf_counter()
    yield figures
    torch.cuda.synchronize()
    figures["seconds"] = perf_counter() - start
    figures["extra_gib"] = (torch.cuda.max_memory_allocated() - before) / BYTES_PER_GIB
    figures["left_gib"] = (torch.cuda.memory_allocated() - before) / BYTES_PER_GIB


def _decode(engine: VllmEngine, batch: int) -> dict[str, float]:
    prompts = [[5 + (row + column) % 10 for column in range(PROMPT_TOKENS)] for row in range(batch)]
    with _measured() as figures:
        sampled = engine.generate(prompts, NEW_TOKENS, 1.0, seed=0)
    tokens = int(sampled.response_mask.sum())
    return {"tokens_per_s": tokens / figures["seconds"], "tokens": tokens}


def main() -> None:
    """Measures each `model:precision` and writes the record after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("engines", nargs="+", metavar="MODEL:PRECISION")
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        "benchmark": "rollout",
        "hardware": hardware("cuda"),
        "versions": versions() | {"vllm": vllm_version()},
        "new_tokens": NEW_TOKENS,
        "engines": {},
    }
    for name in arguments.engines:
        # a process each: a second engine in one process cannot capture CUDA graphs
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            record["engines"][name] = process.submit(run, *name.split(":")).result()
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
        Console().print(name, record["engines"][name])


if __name__ == "__main__":
    main()
