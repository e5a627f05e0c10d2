"""What a run through verl needs of memory, by GPUs: predicted from shapes, and as measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.markdown import Row, markdown_table
from analysis.tables.rows import Engines, engines_of, number, read_servings, read_synced
from experiments.benchmarks.engine_tables import engine_name
from experiments.study.schema import ROOT
from experiments.support.json_files import read_json
from qat_core.planning.predicted_memory import (
    Precision,
    predict_offloaded_memory_gib,
    predict_training_memory_gib,
    predict_weight_memory_gib,
)

MODELS = ("qwen3-8b", "qwen3-30b-a3b")
GPUS = (1, 2, 4, 8)
REPORTED, CACHE = "memory.reported_gib", "kv_cache_tokens"
PRECISIONS: Mapping[str, Precision] = {"bf16": "bf16", "nvfp4": "full"}
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


def memory_sections(folder: Path, machine: str) -> list[str]:
    """Tables of training and rollouts."""
    configs = {name: read_json(ROOT / "experiments" / "models" / f"{name}.json") for name in MODELS}
    servings, reported = read_servings(folder, machine), read_synced(folder, machine)
    engines = engines_of(servings)
    served = [
        {
            "Engine": engine_name(name := f"{model}:{precision}"),
            "Weights, predicted, GiB": f"{predict_weight_memory_gib(config, predicted):.2f}",
            "as vLLM reported": _shown(reported, name, REPORTED, ".2f"),
            "KV cache measured, tokens": _shown(engines, name, CACHE, ","),
        }
        for model, config in configs.items()
        for precision, predicted in PRECISIONS.items()
    ]
    return [
        TRAINING_TITLE,
        markdown_table(_training_row(model, config) for model, config in configs.items()),
        TRAINING_NOTE,
        ROLLOUT_TITLE,
        markdown_table(served),
        "As vLLM reported: in the table of weight syncs, which names the commit. KV cache: on "
        f"{number(servings[0].settings, 'gpu_memory_utilization'):.0%} of a GPU. "
        f"Measured on: {'; '.join(sorted({it.setup for it in servings}))}.",
    ]


def _shown(engines: Engines, name: str, key: str, form: str) -> str:
    return format(number(engines[name], key), form) if name in engines else ""


def _training_row(model: str, config: dict[str, Any]) -> Row:
    sizes = (4, 2)  # bytes of a value in FP32 and in BF16
    of_gpus = {
        f"{gpus} GPU{'s' if gpus > 1 else ''}, FP32 / BF16": " / ".join(
            f"{predict_training_memory_gib(config, gpus, size):.1f}" for size in sizes
        )
        for gpus in GPUS
    }
    host = (f"{predict_offloaded_memory_gib(config, GPUS[-1], size):.0f}" for size in sizes)
    return {"Model": model, **of_gpus, "Host, FP32 / BF16": " / ".join(host)}
