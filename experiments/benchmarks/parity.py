"""Do trainer and vLLM agree on the probability of sampled tokens? k3 KL of four arms.

    python -m experiments.benchmarks.parity experiments/records/benchmarks/parity_h200.json

Per model, one BF16 engine and one NVFP4 engine serve all arms and seeds through weight syncs:
`bf16` (noise floor), `qat-pow2`, `qat-amax`, and `no-qat` (BF16 trainer, packed rollouts). Before
and after all syncs the first weights must give the same sample, bit for bit.
Weights are random with heavy-tailed rows. `--device cpu` rehearses with tiny models.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from experiments.benchmarks.random_model import write_random_checkpoint
from experiments.provenance import hardware, versions
from qat_core.checkpoint.architecture import meta_model
from qat_core.plan import plan
from qat_core.recipe import Recipe
from qat_core.rl.mismatch import mismatch_metrics
from qat_core.rl.policy import Policy
from qat_core.rollout.engine import Rollouts
from qat_core.rollout.packed import weight_stream
from qat_core.rollout.vllm import VllmEngine, vllm_version

SEEDS = (0, 1, 2)
POW2, AMAX = Recipe.full(), Recipe.full(scale="amax")
# arm: what training rounds, what is packed
ARMS = {
    "bf16": (None, None),
    "qat-pow2": (POW2, POW2),
    "qat-amax": (AMAX, AMAX),
    "no-qat": (None, POW2),
}
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MODELS = {"dense": DENSE, "moe": MOE}
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"sequences": 256, "tokens": 288, "rows": 32, "shrink": {}},
    "cpu": {
        "sequences": 8,
        "tokens": 16,
        "rows": 8,
        "shrink": {"num_hidden_layers": 2, "hidden_size": 128, "head_dim": 64, "vocab_size": 64},
    },
}


def run_model(config: dict[str, Any], device: str, folder: Path) -> dict[str, Any]:
    """k3 KL of every arm and seed of one architecture."""
    checkpoints = []
    for seed in SEEDS:
        checkpoints.append(folder / str(seed))
        write_random_checkpoint(config, checkpoints[-1], seed, device)
    arms: dict[str, list[dict[str, float]]] = {}
    repeats = {}
    for engine_arms in (["bf16"], ["qat-pow2", "qat-amax", "no-qat"]):
        # a process each: a second engine in one process cannot capture CUDA graphs
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            job = process.submit(measure_arms, checkpoints, engine_arms, device)
            measured, repeats[engine_arms[0]] = job.result()
        arms |= measured
    floor = _mean_k3(arms["bf16"])
    ratios = {arm: _mean_k3(values) / floor for arm, values in arms.items()}
    return {"arms": arms, "of_noise_floor": ratios, "first_weights_again_equal": repeats}


def measure_arms(
    checkpoints: list[Path], arms: list[str], device: str
) -> tuple[dict[str, list[dict[str, float]]], bool]:
    """Metrics of each seed of some arms, and whether the first weights again gave the same."""
    engine = _engine(checkpoints[0], arms[0], device)
    first, _ = _measure(engine, checkpoints[0], arms[0], device, SEEDS[0])
    measured: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for arm in arms:
        for seed, checkpoint in zip(SEEDS, checkpoints, strict=True):
            measured[arm].append(_measure(engine, checkpoint, arm, device, seed)[1])
    again, _ = _measure(engine, checkpoints[0], arms[0], device, SEEDS[0])
    return measured, torch.equal(first.log_probs, again.log_probs)


def _engine(checkpoint: Path, arm: str, device: str) -> VllmEngine:
    _, packed = ARMS[arm]
    served = plan(meta_model(checkpoint), packed) if packed else None
    settings: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 256}
    if device == "cuda":
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [256]}
        settings |= {"kv_cache_memory_bytes": 8 * 2**30, "compilation_config": graphs}
        settings["gpu_memory_utilization"] = 0.3  # only checked against free memory
    else:
        settings |= {"kv_cache_memory_bytes": 2**26, "enforce_eager": True}
    return VllmEngine(checkpoint, served, **settings)


@torch.no_grad()
def _measure(
    engine: VllmEngine, checkpoint: Path, arm: str, device: str, seed: int
) -> tuple[Rollouts, dict[str, float]]:
    size = SIZES[device]
    trained, packed = ARMS[arm]
    policy = Policy(checkpoint, trained, device)
    announced = plan(policy.model, packed) if packed else None
    engine.sync(weight_stream(policy.model, announced, packed), announced)
    generator = torch.Generator().manual_seed(seed)
    vocabulary = policy.model.config.vocab_size
    prompts = torch.randint(5, vocabulary, (size["sequences"], 8), generator=generator).tolist()
    sampled = engine.generate(prompts, size["tokens"], 1.0, seed)
    trained_BT = torch.cat([policy.log_probs(rows)[0].cpu() for rows in _chunks(sampled, device)])
    metrics = mismatch_metrics(trained_BT, sampled.log_probs, sampled.response_mask, 2.0)
    return sampled, {
        "k3_kl": float(metrics["rollout_corr/k3_kl"]),
        "kl": float(metrics["rollout_corr/kl"]),
        "tokens": int(sampled.response_mask.sum()),
    }


def _chunks(sampled: Rollouts, device: str) -> Iterator[Rollouts]:
    rows = SIZES[device]["rows"]
    for start in range(0, len(sampled.input_ids), rows):
        part = sampled.select(slice(start, start + rows))
        yield Rollouts(*(tensor.to(device) for tensor in vars(part).values()))


def _mean_k3(values: list[dict[str, float]]) -> float:
    """Mean over all tokens of all seeds."""
    tokens = sum(value["tokens"] for value in values)
    return sum(value["k3_kl"] * value["tokens"] for value in values) / tokens


def main() -> None:
    """Measures both models and writes the record after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    device, console = arguments.device, Console()
    record: dict[str, Any] = {
        "benchmark": "parity",
        "hardware": hardware(device),
        "versions": versions() | {"vllm": vllm_version()},
        "sizes": SIZES[device],
        "models": {},
    }
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            shrunk = MODELS[name] | SIZES[device]["shrink"]
            record["models"][name] = run_model(shrunk, device, Path(folder))
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
        console.print(name, record["models"][name]["of_noise_floor"])


if __name__ == "__main__":
    main()
