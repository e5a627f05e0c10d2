import json
from pathlib import Path
from typing import Any

import pytest

from analysis.tables import benchmark_text
from experiments.study.schema import ROOT

SETUP = {"hardware": {"gpus": ["GPU X"]}, "versions": {"vllm": "1.2", "torch": "3.4"}}


def _engine(seconds: list[float], stock: list[float]) -> dict[str, Any]:
    return {
        "memory": {"reported_gib": 6.04, "layer_gib": 0.5, "predicted_over_reported": -0.0125},
        "syncs": [{"seconds": s, "extra_gib": s / 10} for s in seconds],
        "stock_syncs": [{"seconds": s, "extra_gib": 0.0} for s in stock],
    }


def _ratio(ratio: float) -> dict[str, float]:
    bounds = {"low": 0.9 * ratio, "high": 1.1 * ratio}
    return {"mean_k3_kl": 2e-5 * ratio, "ratio": ratio, "tokens": 1000} | bounds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small records of one machine."""
    engines = {"m:nvfp4": _engine([3.0, 1.0, 2.0], []), "m:bf16": _engine([9.0], [])}
    served = {"kv_cache_tokens": 12345, "tokens_per_s": {"1": [1, 20, 300], "8": [1, 3000, 4000]}}
    arms = {"bf16": 1.0, "qat-pow2": 1.05, "qat-amax": 1.5, "no-qat": 250.0}
    model = {"of_noise_floor": {arm: _ratio(ratio) for arm, ratio in arms.items()}}
    records = {
        "rollout": {"allocator": "", "engines": engines},
        "rollout_30b": {"allocator": "", "engines": {"m:bf16": _engine([1.0], [0.5, 0.25, 0.5])}},
        "rollout_expandable": {"allocator": "grows", "engines": {"m:nvfp4": engines["m:nvfp4"]}},
        "serving": {"gpu_memory_utilization": 0.9, "engines": {"m:nvfp4": served}},
        "parity": {"weights": "random", "models": {"m": model}},
        "parity_trained": {
            "weights": "trained",
            "models": {"m": model | {"of_rounded_floor": {"qat-pow2": _ratio(0.98)}}},
        },
    }
    for name, record in records.items():
        (tmp_path / f"{name}_x.json").write_text(json.dumps(SETUP | record))
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "Measured on: GPU X, vLLM 1.2, torch 3.4.",
        "| m BF16 | 6.04 | -1.250% | 1.00 | 0.10 | 0.50 | 0.50 |",
        "| m NVFP4 | 6.04 | -1.250% | 2.00 | 0.30 | 0.50 |  |",
        "| m NVFP4, `grows` | 6.04 | -1.250% | 2.00 | 0.30 | 0.50 |  |",
        "| Engine | KV cache, tokens | tokens/s at 1 | tokens/s at 8 |",
        "| m NVFP4 | 12,345 | 20 | 3,000 |",
        "| m, random weights | 1,000 | 2.00e-05 | 1.05x (0.95x to 1.16x) | 1.50x (1.35x to 1.65x) "
        "| 250x (225x to 275x) |  |",
        "| m, trained weights | 1,000 | 2.00e-05 | 1.05x (0.95x to 1.16x) | 1.50x (1.35x to 1.65x) "
        "| 250x (225x to 275x) | 0.98x (0.88x to 1.08x) |",
    ],
)
def test_a_table_shows(folder: Path, line: str) -> None:
    assert line in benchmark_text("benchmarks", folder, "x").splitlines()


def test_a_missing_record_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout_y.json: missing; run the benchmark"):
        benchmark_text("benchmarks", folder, "y")


def test_a_damaged_record_is_named_with_its_key(folder: Path) -> None:
    (folder / "serving_x.json").write_text(json.dumps(SETUP | {"gpu_memory_utilization": 0.9}))
    with pytest.raises(ValueError, match=r"serving_x.json: engines: Field required"):
        benchmark_text("benchmarks", folder, "x")


def test_the_committed_records_fill_the_tables() -> None:
    tables = benchmark_text("benchmarks", ROOT / "experiments" / "records" / "benchmarks", "h200")
    assert "| qwen3-30b-a3b NVFP4 | 16.89 |" in tables
