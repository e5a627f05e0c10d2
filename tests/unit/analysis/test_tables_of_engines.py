"""Tables of benchmarks of vLLM, from small records as their programs write them."""

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


@pytest.mark.parametrize("kind", sorted(SECTIONS))
def test_a_missing_record_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"_y\.json: missing; run the benchmark"):
        benchmark_text(kind, tmp_path, "y")
