"""Tables of benchmarks of vLLM, from small records as their programs write them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from analysis.tables import SECTIONS, benchmark_text
from experiments.benchmarks.engine_tables import TABLES, rows_of
from experiments.benchmarks.records import shape_of

VERSIONS = {"vllm": "1.2", "torch": "3.4", "transformers": "5.6"}
SETUP = {"hardware": {"gpus": ["GPU X"]}, "versions": VERSIONS}
PACKAGES = ("vllm", "torch")
SMALL, LARGE = "qwen3-8b", "qwen3-30b-a3b"


def _write(folder: Path, name: str, record: dict[str, Any]) -> None:
    (folder / f"{name}_x.json").write_text(json.dumps(SETUP | record))


def _write_engines(
    folder: Path, name: str, benchmark: str, engines: dict[str, Any], **settings: Any
) -> None:
    shape = shape_of(settings, *TABLES[benchmark], PACKAGES)
    _write(folder, name, {**shape, "rows": rows_of(benchmark, engines)})


def _served(speed: float, prefill: float, seconds: float) -> dict[str, Any]:
    """An engine that decodes as fast whatever the number of sequences."""
    return {
        "weight_gib": 1.0,
        "kv_cache_tokens": 12345,
        "tokens_per_s": {batch: [1.0, speed, 9e9] for batch in ("1", "32", "256")},
        "prefill_tokens_per_s": [1.0, prefill, 9e9],
        "rollouts": {"256": {"tokens": 1000, "seconds": seconds}},
    }


def _synced(reported_gib: float, *in_place_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {"memory": {"reported_gib": reported_gib}}
    found["syncs"] = [{"seconds": s, "extra_gib": s / 10} for s in (3.0, 1.0, 2.0)]
    return found | {"in_place_syncs": [{"seconds": s} for s in in_place_s]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small records of engines."""
    small = {
        f"{SMALL}:nvfp4": _served(124.9, 94.0, 5.0),
        f"{SMALL}:humming": _served(125.0, 95.0, 2.0),
        f"{SMALL}:bf16": _served(100.0, 100.0, 4.0),
    }
    for name, engines in (("8b", small), ("30b", {f"{LARGE}:nvfp4": small[f"{SMALL}:nvfp4"]})):
        shared = {"gpu_memory_utilization": 0.9, "torch_compile": True}
        _write_engines(tmp_path, f"serving_{name}", "serving", engines, **shared)
    synced = {f"{SMALL}:nvfp4": _synced(6.04, 0.1001), f"{SMALL}:humming": _synced(6.0, 0.1, 0.05)}
    _write_engines(tmp_path, "rollout", "rollout", synced, allocator="")
    _write_engines(tmp_path, "rollout_expandable", "rollout", synced, allocator="grows")
    return tmp_path


def _write_batches(folder: Path, name: str, arms: dict[str, float], **settings: Any) -> None:
    """Of each arm two seeds whose mean over 100 tokens is 2e-5 of 1e-5 and 5e-5 at ratio 1."""
    lines = ["model,arm,seed,k3_kl,kl,tokens"]
    for arm, ratio in arms.items():
        for seed in (0, 1):
            lines += [f"m,{arm},{seed},{ratio * k3},0,{n}" for k3, n in ((1e-5, 75), (5e-5, 25))]
    with gzip.open(folder / f"{name}_x.csv.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    shape = shape_of(settings, {}, packages=PACKAGES)
    _write(folder, name, {**shape, "rows": [{"model": "m", "arm": arm} for arm in arms]})


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("syncs", "|  | qwen3-8b NVFP4 | 6.04 | 2.000 (1.000 to 3.000) | 0.100 | 0.20 (0.10 to"),
        ("syncs", "| grows | qwen3-8b NVFP4, Humming | 6.00 | 2.000 (1.000 to 3.000) | 0.075 (0"),
        ("benchmarks", "| qwen3-8b NVFP4, Humming | 12,345 | 125 (1.25x) | 125 (1.25x) "),
        # a thousand tokens in 2 s, and BF16's in 4
        ("benchmarks", "| 95 (0.95x) | 2.0 (2.00x) |"),
        ("benchmarks", "| qwen3-30b-a3b NVFP4 | 12,345 | 125 | 125 | 125 | 94 | 5.0 |"),
        # judged before rounding
        ("goals", "| at least 1.25x | 1.25x, met |  | 1.25x, **missed** |"),
        ("goals", "| at least 0.95x | 0.95x, met |  | 0.94x, **missed** |"),
        ("goals", "| at most 0.1 s | 0.075 s, met |  | 0.100 s, **missed** |"),
        ("goals", "| qwen3-30b-a3b | prefill | at least 0.95x | not measured | not measured |"),
        ("memory", "| qwen3-8b NVFP4 | 5.96 | 6.04 | 12,345 |"),
        # batches of a seed are weighed by their tokens
        ("parity", "| random | m | 2 | 200 | 2.00e-05 | 3.00x (3.00x to 3.00x) |"),
        ("parity", "| trained | m | 2 | 200 | 2.00e-05 | 1.00x (1.00x to 1.00x) |"),
    ],
)
def test_a_table_shows(folder: Path, kind: str, line: str) -> None:
    shared = {"kernels": "nvfp4", "torch compile": False}
    _write_batches(folder, "parity", {"bf16": 1.0, "qat-pow2": 3.0}, weights="random", **shared)
    arms = {"bf16": 1.0, "qat-pow2": 1.0, "no-qat": 250.0}
    _write_batches(folder, "parity_trained", arms, weights="trained", **shared)
    assert line in benchmark_text(kind, folder, "x")


def test_a_case_of_zero_mismatch_is_one_row_of_all_its_comparisons(tmp_path: Path) -> None:
    shared = {"model": "dense", "engine": "exact", "trainer": "exact", "k3_kl": 0.0}
    rows = [
        shared
        | {"case": case, "after": after, "batch": "1", "tokens": 600, "unequal": unequal}
        | {"largest_difference": unequal / 10, "expected_zero": expected}
        for case, after, unequal, expected in (
            ("dense", 0, 0, True),
            ("dense", 20, 0, True),
            ("moe", 0, 1, True),
            ("control", 0, 5, False),
        )
    ]
    _write(tmp_path, "zero_mismatch", {"comparisons": rows})
    text = benchmark_text("zero_mismatch", tmp_path, "x")
    assert (
        "| dense | dense | exact | exact | 0, 20 | 1,200 | 0 | 0.0e+00 | 0.0e+00 | 0, met |" in text
    )
    assert (
        "| moe | dense | exact | exact | 0 | 600 | 1 | 1.0e-01 | 0.0e+00 | 0, **missed** |" in text
    )
    assert "| 5 | 5.0e-01 | 0.0e+00 | some, met |" in text


@pytest.mark.parametrize("kind", sorted(SECTIONS))
def test_a_missing_record_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"_y\.json: missing; run the benchmark"):
        benchmark_text(kind, tmp_path, "y")
