"""The tables of verl runs and of products, from small records."""

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.tables import benchmark_text
from analysis.tables.verl import IN_PLACE, KERNELS, RELOADED

SETUP = {
    "hardware": {"gpus": ["GPU X"]},
    "versions": {"verl": "0.1", "vllm": "1.2", "torch": "3.4"},
}
TIMES = ("rollout_s", "log_prob_s", "training_s", "weight_sync_s", "step_s")


def _run(
    arm: str,
    gpus: int,
    k3_kl: float,
    packed_gib: float | None,
    planned_steps: int = 4,
    commit: str = "0123456789",
) -> dict[str, Any]:
    spreads = {"k3_kl": k3_kl} | {name: float(i + 1) for i, name in enumerate(TIMES)}
    return {
        "model": "m",
        "arm": arm,
        "gpus": gpus,
        "steps": 4,
        "planned_steps": planned_steps,
        "git": {"commit": commit},
        "mean_k3_kl": k3_kl / 2,
        "memory": {"measured_bf16_gib": 8.0, "measured_packed_gib": packed_gib},
    } | {name: {"median": value, "low": value, "high": value} for name, value in spreads.items()}


def _write(path: Path, *runs: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(SETUP | {"runs": runs}))


def test_ratio_is_to_the_bf16_run_on_as_many_gpus(tmp_path: Path) -> None:
    runs = [_run("bf16", 1, 2e-5, None), _run("bf16", 2, 4e-5, None), _run("qat", 2, 6e-5, 2.25)]
    _write(tmp_path / "benchmarks" / "verl_x.json", *runs)
    text = benchmark_text("verl", tmp_path / "benchmarks", "x")
    row = "| m | qat | 2 | 4 | 2.25 GiB |  | 3.00e-05 | 1.50x | 6.00e-05 | 1.50x |"
    assert f"{row} 0123456 | 1.0 |" in text
    assert "| m | bf16 | 1 | 4 | 8.00 GiB |  | 1.00e-05 | 1.00x | 2.00e-05 | 1.00x |" in text
    assert "Measured on: GPU X; verl 0.1, vllm 1.2, torch 3.4" in text


def test_run_without_a_floor_shows_no_ratio(tmp_path: Path) -> None:
    _write(tmp_path / "benchmarks" / "verl_x.json", _run("qat", 4, 6e-5, 2.25))
    assert (
        "| m | qat | 4 | 4 | 2.25 GiB |  | 3.00e-05 |  | 6.00e-05 |  | 0123456 | 1.0 |"
        in benchmark_text("verl", tmp_path / "benchmarks", "x")
    )


def test_run_that_ended_early_says_so(tmp_path: Path) -> None:
    run = _run("qat", 1, 6e-5, None, planned_steps=20)
    _write(tmp_path / "benchmarks" / "verl_x.json", run | {"memory": {"predicted_packed_gib": 2.0}})
    assert "| m | qat | 1 | 4 of 20 |  |  | 3.00e-05 |  | 6.00e-05 |" in benchmark_text(
        "verl", tmp_path / "benchmarks", "x"
    )


def test_means_and_medians_have_ratios_of_their_own(tmp_path: Path) -> None:
    floor = _run("bf16", 1, 2e-5, None) | {"mean_k3_kl": 1e-5}
    run = _run("qat", 1, 6e-5, 2.25) | {"mean_k3_kl": 7e-5}
    _write(tmp_path / "benchmarks" / "verl_x.json", floor, run)
    assert "| 2.25 GiB |  | 7.00e-05 | 7.00x | 6.00e-05 | 3.00x |" in benchmark_text(
        "verl", tmp_path / "benchmarks", "x"
    )


def test_ratio_is_to_the_bf16_run_of_the_same_code(tmp_path: Path) -> None:
    before = [
        _run(arm, 1, k3_kl, None, commit="abcdef012")
        for arm, k3_kl in (("bf16", 3e-2), ("noqat", 9e-1))
    ]
    runs = [*before, _run("bf16", 1, 3e-3, None), _run("noqat", 1, 9e-1, 2.25)]
    _write(tmp_path / "benchmarks" / "verl_x.json", *runs)
    text = benchmark_text("verl", tmp_path / "benchmarks", "x")
    assert "| 9.00e-01 | 30.0x | abcdef0 |" in text
    assert "| 9.00e-01 | 300x | 0123456 |" in text


def test_tensors_stand_beside_what_vllm_reports_of_them(tmp_path: Path) -> None:
    run = _run("qat", 1, 6e-5, 2.25)
    run["memory"] |= {"reported_gib": 2.5}
    _write(tmp_path / "benchmarks" / "verl_x.json", run)
    text = benchmark_text("verl", tmp_path / "benchmarks", "x")
    assert "| m | qat | 1 | 4 | 2.25 GiB | 2.50 GiB |" in text


def test_peaks_have_a_table_of_their_own(tmp_path: Path) -> None:
    without, run = _run("bf16", 4, 6e-5, None), _run("qat", 4, 6e-5, 2.25)
    run["memory"] |= {"actor_peak_gib": 61.25, "gpu_peak_gib": 90.0, "host_peak_gib": 228.4}
    run["outside_steps_s"] = 75.4
    _write(tmp_path / "benchmarks" / "verl_x.json", without)
    assert "Memory of these runs" not in benchmark_text("verl", tmp_path / "benchmarks", "x")
    _write(tmp_path / "benchmarks" / "verl_x_more.json", run)
    peaks = benchmark_text("verl", tmp_path / "benchmarks", "x").partition("Memory of these")[2]
    assert "| m | qat | 4 | 61.2 | 90.0 | 228.4 | 75 |" in peaks
    assert "bf16" not in peaks


def test_runs_of_recorded_studies_are_left_out(tmp_path: Path) -> None:
    run = tmp_path / "study" / "m_bf16_seed0"
    run.mkdir(parents=True)
    (run / "manifest.json").touch()
    runs = _run("bf16", 1, 2e-5, None), _run("qat", 1, 6e-5, 2.25)
    _write(tmp_path / "benchmarks" / "verl_x.json", *runs)
    text = benchmark_text("verl", tmp_path / "benchmarks", "x")
    assert "| bf16 |" not in text and "| m | qat |" in text


@pytest.mark.parametrize(
    ("arm", "of_reloading_code", "asked", "name"),
    [
        ("qat", True, None, "qat, reload"),
        ("qat", True, "1", "qat"),
        ("qat", False, None, "qat"),
        ("qat", False, "0", "qat, reload"),
        ("bf16", True, "0", "bf16"),
    ],
)
def test_syncs_through_the_reload_are_marked(
    arm: str, of_reloading_code: bool, asked: str | None, name: str, tmp_path: Path
) -> None:
    run = _run(arm, 1, 6e-5, 2.25, **({"commit": RELOADED[-1]} if of_reloading_code else {}))
    run["environment"] = {IN_PLACE: asked} if asked else {}
    _write(tmp_path / "benchmarks" / "verl_x.json", run)
    assert f"| m | {name} | 1 |" in benchmark_text("verl", tmp_path / "benchmarks", "x")


@pytest.mark.parametrize(("variable", "what"), KERNELS.items())
def test_other_kernels_are_marked(variable: str, what: str, tmp_path: Path) -> None:
    bf16, qat = _run("bf16", 1, 2e-5, None), _run("qat", 1, 6e-5, 2.25)
    qat["environment"] = bf16["environment"] = {variable: "humming"}
    _write(tmp_path / "benchmarks" / "verl_x.json", bf16, qat)
    text = benchmark_text("verl", tmp_path / "benchmarks", "x")
    assert f"| m | qat, {what} by humming | 1 | 4 |" in text and "| m | bf16 | 1 |" in text


def test_products_are_those_of_a_decoder_layer(tmp_path: Path) -> None:
    bf16 = {"us": [1, 30, 90], "error": 0.001}
    arms = {
        f"humming{tiling}": {"us": [1, 20, 90], "error": 0.002}
        for tiling in ("", " unsplit", " invariant")
    }
    case = {"tokens": 1024, "experts_hit": 0.0, "floor_us": {"nvfp4": 4.0, "bf16": 16.0}}
    arms |= {"triton nvfp4": {"us": [1, 60, 90], "error": 0.002}}
    arms |= {"bf16": bf16, "marlin": {"us": [1, 600, 900], "error": 0.004}}
    cases = [case | {"layer": f"m.{name}", "arms": arms} for name in ("qkv", "o")]
    setup = {"hardware": SETUP["hardware"]}
    setup["versions"] = {"vllm": "1.2", "torch": "3.4", "humming-kernels": "5.6"}
    (tmp_path / "matmul_x.json").write_text(json.dumps(setup | {"cases": cases}))
    text = benchmark_text("matmul", tmp_path, "x")
    assert "layer: linear layers of m**" in text and "experts of m" not in text
    humming = "40 (1.50x) | 40 (1.50x) | 40 (1.50x)"
    assert f"| 1,024 | 8 | 60 | 1,200 (0.05x) | {humming} | 120 (0.50x) |" in text
    assert "Our Triton kernel, us" in text and "grouped product, us" not in text
    assert "FP64: Marlin 4.0e-03, Humming 2.0e-03," in text


@pytest.mark.parametrize("kind", ["verl", "codec", "matmul", "equal_bits"])
def test_missing_record_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"_x\.json: missing; run the benchmark"):
        benchmark_text(kind, tmp_path, "x")


@pytest.mark.parametrize("k3_kl", [0.0, -1e-6])
def test_a_mismatch_that_no_run_has_is_refused_by_name(k3_kl: float, tmp_path: Path) -> None:
    _write(tmp_path / "benchmarks" / "verl_x.json", _run("bf16", 1, k3_kl, None))
    with pytest.raises(ValueError, match=r"(?s)verl_x\.json.*k3_kl"):
        benchmark_text("verl", tmp_path / "benchmarks", "x")
