"""What a run through verl needs of memory, by GPUs: predicted from shapes, and as measured."""

from pathlib import Path
from typing import Any

from analysis.markdown import MarkdownTable
from analysis.tables.engines import engines_of, number, read_servings, read_synced
from experiments.benchmarks.engine_tables import engine_name
from experiments.study.schema import ROOT
from experiments.support.json_files import read_json
from qat_core.planning.predicted_memory import (
    predict_offloaded_memory_gib,
    predict_training_memory_gib,
    predict_weight_memory_gib,
)

MODELS = ("qwen3-8b", "qwen3-30b-a3b")
GPUS = (1, 2, 4, 8)
REPORTED, CACHE = "memory.reported_gib", "kv_cache_tokens"
PRECISIONS = {"bf16": "bf16", "nvfp4": "full"}
TRAINING_TITLE = "**Training: what an AdamW step holds, GiB on each GPU (predicted)**"
TRAINING_NOTE = (
    "Sharded by FSDP2, in FP32 as verl trains by default, and in BF16 (`model_dtype: bfloat16`). "
    "Weights, gradients, two moments, and the root of the second, which `fused: true` avoids: then "
    "a fifth less, and activations come on top. Host: shards of eight GPUs with `param_offload` "
    "and `optimizer_offload`, which leave the GPU to vLLM during rollouts; without them both "
    "memories add up on each GPU. It is pinned memory, of which PyTorch rounds each block up to a "
    "power of two; processes come on top."
)
ROLLOUT_TITLE = "**Rollouts: vLLM on each GPU, without tensor parallelism**"


TRAINING_TABLE: MarkdownTable[tuple[str, dict[str, Any]]] = MarkdownTable(
    {"Model": lambda row: row[0]}
    | {
        f"{gpus} GPU{'s' if gpus > 1 else ''}, FP32 / BF16": lambda row, gpus=gpus: " / ".join(
            f"{predict_training_memory_gib(row[1], gpus, size):.1f}" for size in (4, 2)
        )
        for gpus in GPUS
    }
    | {
        "Host, FP32 / BF16": lambda row: " / ".join(
            f"{predict_offloaded_memory_gib(row[1], GPUS[-1], size):.0f}" for size in (4, 2)
        )
    }
)
ROLLOUT_TABLE: MarkdownTable[tuple[str, ...]] = MarkdownTable(
    {
        "Engine": lambda row: row[0],
        "Weights, predicted, GiB": lambda row: row[1],
        "as vLLM reported": lambda row: row[2],
        "KV cache measured, tokens": lambda row: row[3],
    }
)


def memory_sections(folder: Path, machine: str) -> list[str]:
    """Tables of training and rollouts.

    Raises:
        ValueError: a record is missing or damaged.
    """
    configs = {name: read_json(ROOT / "experiments" / "models" / f"{name}.json") for name in MODELS}
    reported, servings = read_synced(folder, machine), read_servings(folder, machine)
    engines = engines_of(servings)
    served = []
    for model, config in configs.items():
        for precision, predicted in PRECISIONS.items():
            name = f"{model}:{precision}"
            weights_gib = predict_weight_memory_gib(config, predicted)  # type: ignore[arg-type]
            known = f"{number(reported[name], REPORTED):.2f}" if name in reported else ""
            tokens = f"{number(engines[name], CACHE):,}" if name in engines else ""
            served.append((engine_name(name), f"{weights_gib:.2f}", known, tokens))
    return [
        TRAINING_TITLE,
        TRAINING_TABLE.markdown(configs.items()),
        TRAINING_NOTE,
        ROLLOUT_TITLE,
        ROLLOUT_TABLE.markdown(served),
        "As vLLM reported: in the table of weight syncs, which names the commit. KV cache: on "
        f"{number(servings[0].settings, 'gpu_memory_utilization'):.0%} of a GPU. "
        f"Measured on: {'; '.join(sorted({it.setup for it in servings}))}.",
    ]
