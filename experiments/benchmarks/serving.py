"""What NVFP4 buys at inference: room for KV cache, throughput, and time of a step's rollouts.

    python -m experiments.benchmarks serving experiments/records/benchmarks/serving_8b_h200.json \\
        --compile qwen3-8b:humming qwen3-8b:nvfp4 qwen3-8b:bf16

Random weights on 90 % of a GPU, CUDA graphs for decoding; with `--compile` as vLLM is by default,
torch.compile and CUDA graphs of what is around attention in other steps, whatever their size.
What is measured the note in `engine_tables` says, and how engines differ `engines.PRECISIONS`.
Prompts are of random tokens: with alike ones an MoE's random router sends all sequences to the same
few experts. No sequence has a seed, as in verl. `--starts 2` starts each engine so often, in turns
with the others, as trials of one engine differ; no rollouts are measured then. `--resume` goes on
with a record whose run was cut off. `--device cpu` rehearses with nano models.
"""

import argparse
import tempfile
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.base.random_model import write_architecture
from experiments.benchmarks.architectures import engine_settings
from experiments.benchmarks.engine_tables import BATCHES, PROMPTS
from experiments.benchmarks.engines import read_engine, record_engines
from experiments.benchmarks.timing import quartiles
from qat_core.checkpoint.architecture import meta_model
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.vllm.engine import VllmEngine
from qat_core.units import BYTES_PER_GIB
from qat_core.weights.stream import packed_weights

GPU_MEMORY_UTILIZATION = 0.9
REPEATS = 3
PROMPT_TOKENS = 32
WEIGHT_STD = 0.02  # of all weights, norms too
NEW_TOKENS = {"cuda": 128, "cpu": 8}
PREFILL = {"cuda": (4, 2048), "cpu": (2, 32)}  # prompts, tokens of each
ROLLOUTS = {"cuda": PROMPTS, "cpu": (8, 16)}
ROLLOUT_TOKENS = {"cuda": 2048, "cpu": 16}  # new ones of each prompt
# tokens of a step
GRAPHS = [1, 2, 4, 8, 16, *range(32, 256, 32), *range(256, 512, 64), *range(512, 1025, 128)]
GRAPHS += [2048, 4096, 8192]


def run(name: str, device: str, *, compiled: bool, rollouts: bool) -> dict[str, Any]:
    """KV cache and throughput of one `model:precision`; rates of each repeat."""
    engine, config = start(name, device, compiled=compiled)
    kv_bytes_per_token = (
        2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    )
    of_rollouts = ROLLOUT_TOKENS[device], config["vocab_size"]
    return {
        "weight_gib": engine.weight_bytes / BYTES_PER_GIB,
        "kv_cache_tokens": engine.kv_cache_tokens,
        "kv_cache_gib": engine.kv_cache_tokens * kv_bytes_per_token / BYTES_PER_GIB,
        "tokens_per_s": {
            str(batch): _decode(engine, batch, config["vocab_size"], device) for batch in BATCHES
        },
        "prefill_tokens_per_s": _prefill(engine, config["vocab_size"], device),
        "rollouts": {
            str(count): _sample(engine, (count, PROMPT_TOKENS), *of_rollouts, seed=0)
            for count in ROLLOUTS[device]
            if rollouts
        },
    }


def join(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Quartiles of the repeats of all starts; all else is of the first."""

    def all_of(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: all_of([it[name] for it in values]) for name in values[0]}
        return quartiles([*chain(*values)]) if isinstance(values[0], list) else values[0]

    joined: dict[str, Any] = all_of(starts)
    return joined


def start(name: str, device: str, *, compiled: bool = False) -> tuple[VllmEngine, dict[str, Any]]:
    """The engine of a `model:precision` with its random weights, and its model's config.json."""
    config, is_packed = read_engine(name)
    recipe = Recipe.full()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        write_architecture(config, folder)
        served = plan(meta_model(folder), recipe) if is_packed else None
        settings = _settings(device, compiled) | {"load_format": "dummy"}
        engine = VllmEngine(folder, served, exact=":exact" in name, **settings)
        shapes = {entry.name: entry.shape for entry in engine.plan.entries}

        def read(name: str) -> Tensor:
            return WEIGHT_STD * torch.randn(shapes[name], device=device, dtype=torch.bfloat16)

        engine.sync(packed_weights(engine.plan, recipe, read), engine.plan)
    return engine, config


def _settings(device: str, compiled: bool) -> dict[str, Any]:
    settings = engine_settings(device, max(*BATCHES, *ROLLOUTS[device]), compiled=compiled)
    if device == "cpu":
        return settings
    del settings["kv_cache_memory_bytes"]
    settings["compilation_config"] |= {"cudagraph_capture_sizes": GRAPHS}
    prompts, tokens = PREFILL[device]
    return settings | {
        "gpu_memory_utilization": GPU_MEMORY_UTILIZATION,
        "max_model_len": PROMPT_TOKENS + ROLLOUT_TOKENS[device],
        "max_num_batched_tokens": prompts * tokens,
    }


def random_prompts(count: int, num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts that have no more in common than chance, with those of other counts neither."""
    generator = np.random.default_rng((seed, count, num_tokens))
    tokens: list[list[int]] = generator.integers(vocab_size, size=(count, num_tokens)).tolist()
    return tokens


def _sample(
    engine: VllmEngine, prompts: tuple[int, int], new: int, vocab_size: int, seed: int
) -> dict[str, float]:
    """Seconds, and how many new tokens; each seed's prompts are others, as vLLM caches prefixes."""
    drawn = random_prompts(*prompts, vocab_size, seed)
    start = perf_counter()
    sampled = engine.sample(drawn, new, seed=None, temperature=1.0)
    return {"seconds": perf_counter() - start, "tokens": int(sampled.response_mask.sum())}


def _decode(engine: VllmEngine, batch: int, vocab_size: int, device: str) -> list[float]:
    """New tokens a second, prefill included, of each repeat."""
    shape, new = (batch, PROMPT_TOKENS), NEW_TOKENS[device]
    found = [_sample(engine, shape, new, vocab_size, seed) for seed in range(REPEATS + 1)]
    return [it["tokens"] / it["seconds"] for it in found[1:]]  # the first warms up


def _prefill(engine: VllmEngine, vocab_size: int, device: str) -> list[float]:
    """Prompt tokens a second."""
    shape = PREFILL[device]
    found = [_sample(engine, shape, 1, vocab_size, seed) for seed in range(REPEATS + 1)]
    return [prod(shape) / it["seconds"] for it in found[1:]]


def main(arguments: argparse.Namespace) -> None:
    """Measures each `model:precision` and writes the record after each."""
    settings = {
        "torch_compile": arguments.compile,
        "gpu_memory_utilization": GPU_MEMORY_UTILIZATION,
        "new_tokens": NEW_TOKENS[arguments.device],
        "prompts": "random tokens",
        "seeds": "none",
        "starts": arguments.starts,
    }
    measure = partial(run, compiled=arguments.compile, rollouts=arguments.starts == 1)
    record_engines(arguments, "serving", settings, measure, join, arguments.starts)
