"""Engines `model:precision` in words, and how the records of the benchmarks of them are shown."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from experiments.benchmarks.records import Column, Row, complete, flat

PRECISIONS = {
    "nvfp4": "NVFP4",
    "humming": "NVFP4, Humming",
    "humming-experts": "NVFP4, experts by Humming",
    "vllm-humming": "NVFP4, vLLM's Humming",
    "vllm-humming-invariant": "NVFP4, vLLM's Humming, batch-invariant",
    "vllm-humming-experts": "NVFP4, experts by vLLM's Humming",
    "repeatable": "NVFP4, Marlin or unpacked, experts by Humming",
    "bf16": "BF16",
    "exact": "NVFP4, exact",
    "exact-bf16": "BF16, exact",
}
ROLLOUT = {
    "name": Column(heading="Engine"),
    "memory.reported_gib": Column(heading="vLLM's report, GiB", format=".2f"),
    "memory.tensors_gib": Column(heading="Tensors, GiB", format=".2f"),
    "memory.predicted_over_tensors": Column(heading="Prediction error", format=".3%"),
    "memory.allocator_gaps_gib": Column(heading="Gaps, GiB", format=".3f"),
    "syncs.seconds": Column(heading="Sync, s", format=".3f"),
    "in_place_syncs.seconds": Column(heading="In place, s", format=".3f"),
    "packing.seconds": Column(heading="Packing alone, s", format=".3f"),
    "syncs.extra_gib": Column(heading="Extra memory, GiB", format=".2f"),
    "memory.layer_gib": Column(heading="One BF16 layer, GiB", format=".2f"),
    "stock_syncs.seconds": Column(heading="vLLM's own load, s", format=".3f"),
}
ROLLOUT_NOTE = (
    "Weight memory, and weight sync from a BF16 model on the same GPU. Tensors: what vLLM's "
    "weights take, its rotary cache included, and the prediction from shapes against it. Gaps: "
    "what PyTorch's allocator leaves between them, which vLLM's own report includes (none with "
    "`expandable_segments`); some 0.02 GiB are of the model that is synced from. Sync: through "
    "vLLM's reload; in place: past it, as by default; packing: the trainer's part of either. "
    "Medians of five, in brackets least and most. Extra memory: peak during a sync through the "
    "reload. vLLM's own load: the same BF16 tensors through `load_weights`, as verl syncs them."
)
BATCHES, PROMPTS = (1, 32, 256), (256, 1024)  # decoded at once; of a rollout step


def over_bf16(key: str) -> str:
    """The column of a speed over BF16's of the same run."""
    return f"of_bf16.{key}"


def _speed(key: str, heading: str, form: str = ",.0f") -> dict[str, Column]:
    return {key: Column(heading=heading, format=form, ratio=over_bf16(key))}


SERVING = {
    "name": Column(heading="Engine"),
    "kv_cache_tokens": Column(heading="KV cache, tokens", format=","),
}
for _batch in BATCHES:
    SERVING |= _speed(f"tokens_per_s.{_batch}", f"new tokens/s at {_batch}")
SERVING |= _speed("prefill_tokens_per_s", "Prefill, tokens/s")
for _count in PROMPTS:
    SERVING |= _speed(f"rollouts.{_count}.seconds", f"Rollouts of {_count:,} prompts, s", ".1f")
SERVING_NOTE = (
    "KV cache and decoding on a share of the GPU, by sequences at once. In brackets: speed over "
    "BF16's of the same run. At 1, 32 and 256: so many sequences of 32 prompt and 128 new tokens "
    "each; counted are new ones, and the time includes the prompts' prefill. Prefill: 8,192 tokens "
    "in four prompts. Rollouts of a step: so many prompts, up to 2,048 new tokens each. Weights "
    "and the prompts' tokens are random. vLLM sets memory aside for 1,024 sequences at once."
)
TABLES = {"rollout": (ROLLOUT, ROLLOUT_NOTE), "serving": (SERVING, SERVING_NOTE)}


def engine_name(name: str) -> str:
    """`model:precision` in words."""
    model, _, precision = name.partition(":")
    return f"{model} {PRECISIONS[precision]}"


def rows_of(benchmark: str, engines: Mapping[str, Any]) -> list[Row]:
    """A row an engine, by model; with speeds over those of the model's BF16 engine."""
    rows: dict[str, Row] = {
        name: {"engine": name, "name": engine_name(name), **flat(engines[name])}
        for name in sorted(engines)
    }
    columns, _ = TABLES[benchmark]
    for name, row in rows.items():
        floor = rows.get(f"{name.partition(':')[0]}:bf16", row)
        for key, column in columns.items():
            own, base = _speed_of(row, key), _speed_of(floor, key)
            if column.ratio and floor is not row and own and base:
                row[column.ratio] = own / base
    return [complete(columns, row) for row in rows.values()]


def _speed_of(row: Row, key: str) -> float | None:
    """The median of a row's tokens a second."""
    cell = row.get(key)
    tokens = row.get(key.replace("seconds", "tokens"))
    if isinstance(cell, list):
        return median(cell)
    if isinstance(cell, float) and isinstance(tokens, int):
        return tokens / cell
    return None
