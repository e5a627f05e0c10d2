"""What NVFP4 buys at inference: room for KV cache and decode throughput, on 90 % of a GPU.

    python -m experiments.benchmarks.serving experiments/records/benchmarks/serving_h200.json \\
        qwen3-30b-a3b:nvfp4 qwen3-30b-a3b:bf16 qwen3-8b:nvfp4 qwen3-8b:bf16

Random weights, CUDA graphs for decoding, prompts of 32 tokens, 128 new ones. `--device cpu`
rehearses with the nano models.
"""

import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.architectures import engine_settings
from experiments.benchmarks.engines import parse_arguments, read_engine, record_engines
from experiments.benchmarks.random_model import write_architecture
from experiments.benchmarks.timing import quartiles
from qat_core.checkpoint.architecture import meta_model
from qat_core.plan import plan
from qat_core.recipe import Recipe
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.units import BYTES_PER_GIB
from qat_core.weights.stream import packed_weights

GPU_MEMORY_UTILIZATION = 0.9
BATCHES = (1, 32, 256)
REPEATS = 3
PROMPT_TOKENS = 32
NEW_TOKENS = {"cuda": 128, "cpu": 8}


def run(name: str, device: str) -> dict[str, Any]:
    """KV cache and throughput of one `model:precision`."""
    config, is_packed = read_engine(name)
    recipe = Recipe.full()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        write_architecture(config, folder)
        served = plan(meta_model(folder), recipe) if is_packed else None
        engine = VllmEngine(folder, served, load_format="dummy", **_settings(device))
        shapes = {entry.name: entry.shape for entry in engine.plan.entries}

        def read(name: str) -> Tensor:
            return 0.02 * torch.randn(shapes[name], device=device, dtype=torch.bfloat16)

        engine.sync(packed_weights(engine.plan, recipe, read), engine.plan)
    kv_bytes_per_token = (
        2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    )
    return {
        "weight_gib": engine.weight_bytes / BYTES_PER_GIB,
        "kv_cache_tokens": engine.kv_cache_tokens,
        "kv_cache_gib": engine.kv_cache_tokens * kv_bytes_per_token / BYTES_PER_GIB,
        "tokens_per_s": {str(batch): _decode(engine, batch, device) for batch in BATCHES},
    }


def _settings(device: str) -> dict[str, Any]:
    settings = engine_settings(device, max(BATCHES))
    if device == "cpu":
        return settings
    del settings["kv_cache_memory_bytes"]
    settings["compilation_config"] |= {"cudagraph_capture_sizes": list(BATCHES)}
    return settings | {"gpu_memory_utilization": GPU_MEMORY_UTILIZATION}


def _decode(engine: VllmEngine, batch: int, device: str) -> list[float]:
    """Quartiles of new tokens a second, prefill included."""
    prompts = [[5 + (row + column) % 10 for column in range(PROMPT_TOKENS)] for row in range(batch)]
    rates = []
    for seed in range(REPEATS + 1):
        start = perf_counter()
        sampled = engine.generate(prompts, NEW_TOKENS[device], 1.0, seed)
        rates.append(int(sampled.response_mask.sum()) / (perf_counter() - start))
    return quartiles(rates[1:])  # the first warms up


def main() -> None:
    """Measures each `model:precision` and writes the record after each."""
    arguments = parse_arguments(__doc__)
    settings = {
        "gpu_memory_utilization": GPU_MEMORY_UTILIZATION,
        "new_tokens": NEW_TOKENS[arguments.device],
    }
    record_engines(arguments, "serving", settings, run)


if __name__ == "__main__":
    main()
