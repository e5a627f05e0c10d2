import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from analysis.tables import benchmark_text
from experiments.study.schema import ROOT

SETUP = {"hardware": {"gpus": ["GPU X"]}, "versions": {"vllm": "1.2", "torch": "3.4"}}
GIT = {"git": {"commit": "0123456789", "dirty": False}}


def _engine(
    seconds: list[float], stock: list[float], in_place: list[float] | None = None
) -> dict[str, Any]:
    return {
        "memory": {
            "reported_gib": 6.04,
            "tensors_gib": 6.0,
            "layer_gib": 0.5,
            "predicted_over_tensors": -0.0125,
            "allocator_gaps_gib": 0.04,
        },
        "syncs": [{"seconds": s, "extra_gib": s / 10} for s in seconds],
        "stock_syncs": [{"seconds": s, "extra_gib": 0.0} for s in stock],
        "in_place_syncs": [{"seconds": s, "extra_gib": 0.0} for s in in_place or []],
    }


def _write_batches(path: Path, ratios: dict[str, float]) -> None:
    """Of each arm two seeds whose means are a tenth below and above."""
    lines = ["model,arm,seed,k3_kl,kl,tokens"]
    for arm, ratio in ratios.items():
        lines += [
            f"m,{arm},{s},{2e-5 * ratio * factor},0,500" for s, factor in enumerate((0.9, 1.1))
        ]
    with gzip.open(path, "wt") as file:
        file.write("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small records of one machine."""
    engines = {
        "m:nvfp4": _engine([3.0, 1.0, 2.0], []),
        "m:bf16": _engine([1.0], [0.5, 0.25, 0.5]),
        "m:humming": _engine([4.0], [], in_place=[0.125]),
    }
    served = {
        "weight_gib": 1.0,
        "kv_cache_tokens": 12345,
        "tokens_per_s": {"1": [1, 20, 300], "8": [1, 3000, 4000]},
    }
    bf16 = {
        "weight_gib": 1.0,
        "kv_cache_tokens": 999,
        "tokens_per_s": {"1": [1, 10, 300], "8": [1, 4000, 4000]},
        "prefill_tokens_per_s": [1, 5000, 6000],
        "rollouts": {"8": {"tokens": 1000, "seconds": 4.0}},
    }
    humming = served | {
        "prefill_tokens_per_s": [1, 6000, 6000],
        "rollouts": {
            "8": {"tokens": 2000, "seconds": 5.0},
            "1024": {"tokens": 9000, "seconds": 9.0},
        },
    }
    ratios = {"bf16": 1.0, "qat-pow2": 1.05, "qat-amax": 1.5, "no-qat": 250.0}
    parity = {"kernels": "nvfp4", "models": {"m": {}}}
    records = {
        "rollout": GIT | {"allocator": "", "engines": engines},
        "rollout_expandable": {"allocator": "grows", "engines": {"m:nvfp4": engines["m:nvfp4"]}},
        "serving_8b": {
            "gpu_memory_utilization": 0.9,
            "torch_compile": True,
            "engines": {"m:nvfp4": served},
        },
        "serving_30b": {
            "gpu_memory_utilization": 0.9,
            "engines": {"m:bf16": bf16, "m:humming": humming},
        },
        "parity": parity | {"weights": "random"},
        "parity_trained": GIT | parity | {"weights": "trained", "torch_compile": True},
    }
    _write_batches(tmp_path / "parity_x.csv.gz", ratios)
    _write_batches(tmp_path / "parity_trained_x.csv.gz", ratios | {"rounded": 1.0})
    for name, record in records.items():
        (tmp_path / f"{name}_x.json").write_text(json.dumps(SETUP | record))
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "Measured on: GPU X, vLLM 1.2, torch 3.4, commit 0123456; "
        "GPU X, vLLM 1.2, torch 3.4, commit not recorded.",
        "| m BF16 | 0123456 | 6.04 | 6.00 | -1.250% | 0.040 | 1.000 |  |  | 0.10 | 0.50 | 0.500 |",
        "| m NVFP4 | 0123456 | 6.04 | 6.00 | -1.250% | 0.040 | 2.000 |  |  | 0.30 | 0.50 |  |",
        "| m NVFP4, Humming | 0123456 | 6.04 | 6.00 | -1.250% | 0.040 | 4.000 | 0.125 |  "
        "| 0.40 | 0.50 |  |",
        "| m NVFP4, `grows` | not recorded | 6.04 | 6.00 | -1.250% | 0.040 | 2.000 |  |  | 0.30 "
        "| 0.50 |  |",
        "| Engine | Commit | torch.compile | KV cache, tokens | new tokens/s at 1 "
        "| new tokens/s at 8 | Prefill, tokens/s "
        "| Rollouts of 8 prompts, s | Rollouts of 1,024 prompts, s |",
        # without a BF16 engine in its run, then with one that rolled out 1,000 tokens in 4 s
        "| m NVFP4 | not recorded | on | 12,345 | 20 | 3,000 |  |  |  |",
        "| m BF16 | not recorded | off | 999 | 10 | 4,000 | 5,000 | 4.0 |  |",
        "| m NVFP4, Humming | not recorded | off | 12,345 | 20 (2.00x) | 3,000 (0.75x) "
        "| 6,000 (1.20x) | 5.0 (1.60x) | 9.0 |",
        # both arms' seeds differ alike, so that the ratio of every seed is the same
        "| m, random weights | not recorded | 2 | 1,000 | 2.00e-05 | 1.05x (1.05x to 1.05x) "
        "| 1.50x (1.50x to 1.50x) | 250x (250x to 250x) |  |",
        "| m, trained weights, torch.compile | 0123456 | 2 | 1,000 | 2.00e-05 "
        "| 1.05x (1.05x to 1.05x) | 1.50x (1.50x to 1.50x) | 250x (250x to 250x) "
        "| 1.05x (1.05x to 1.05x) |",
    ],
)
def test_a_table_shows(folder: Path, line: str) -> None:
    assert line in benchmark_text("benchmarks", folder, "x").splitlines()


def test_a_missing_record_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout_y.json: missing; run the benchmark"):
        benchmark_text("benchmarks", folder, "y")


def test_a_damaged_record_is_named_with_its_key(folder: Path) -> None:
    (folder / "serving_30b_x.json").write_text(json.dumps(SETUP | {"gpu_memory_utilization": 0.9}))
    with pytest.raises(ValueError, match=r"serving_30b_x.json: engines: missing"):
        benchmark_text("benchmarks", folder, "x")


def test_prompts_that_are_no_number_are_named(folder: Path) -> None:
    path = folder / "serving_30b_x.json"
    path.write_text(path.read_text().replace('"1024"', '"1024s"'))
    with pytest.raises(ValueError, match=r"serving_30b_x.json: engines\..*rollouts\.1024s"):
        benchmark_text("benchmarks", folder, "x")


def test_the_committed_records_fill_the_tables() -> None:
    tables = benchmark_text("benchmarks", ROOT / "experiments" / "records" / "benchmarks", "h200")
    assert "| qwen3-30b-a3b NVFP4 | 123969d | 16.89 | 16.85 |" in tables


def test_batches_of_a_seed_are_weighed_by_their_tokens(folder: Path) -> None:
    lines = ["model,arm,seed,k3_kl,kl,tokens"]
    for arm, ratio in {"bf16": 1.0, "qat-pow2": 3.0}.items():
        for seed in (0, 1):
            # mean over 100 tokens: 2e-5 of 1e-5 and 5e-5
            lines += [f"m,{arm},{seed},{ratio * 1e-5},0,75", f"m,{arm},{seed},{ratio * 5e-5},0,25"]
    with gzip.open(folder / "parity_x.csv.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    ratio = "3.00x (3.00x to 3.00x)"
    row = f"| m, random weights | not recorded | 2 | 200 | 2.00e-05 | {ratio} |  |  |  |"
    assert row in benchmark_text("benchmarks", folder, "x")


@pytest.mark.parametrize(("dirty", "shown"), [(False, ""), (True, " with uncommitted changes")])
def test_a_record_shows_its_commit(folder: Path, dirty: bool, shown: str) -> None:
    for path in folder.glob("*.json"):
        git = {"git": {"commit": "0123456789", "dirty": dirty, "diff_sha256": "d"}}
        path.write_text(json.dumps(json.loads(path.read_text()) | git))
    assert f"torch 3.4, commit 0123456{shown}." in benchmark_text("benchmarks", folder, "x")
