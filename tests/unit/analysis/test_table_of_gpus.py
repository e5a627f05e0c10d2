"""Qwen3 by number of GPUs: what runs have is shown as it is, the rest follows from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.tables import benchmark_text
from analysis.tables.memory import MODELS

SMALL, LARGE = MODELS


def run(arm: str, gpus: int, model: str, **memory: float) -> dict[str, Any]:
    """Log-probs take 8 / GPUs seconds, training 2 + 16 / GPUs, all else does not depend on them."""
    seconds = {
        "rollout_s": 4.0,
        "weight_sync_s": 1.5,
        "log_prob_s": 8 / gpus,
        "training_s": 2 + 16 / gpus,
        "k3_kl": 1e-3,
    }
    seconds["step_s"] = sum(seconds.values()) - 1e-3 + 0.5
    identity = {"model": model, "arm": arm, "gpus": gpus, "commit": "0123456"}
    spreads = {name: [it, it, it] for name, it in seconds.items()}
    return identity | spreads | {f"memory.{name}": gib for name, gib in memory.items()}


def record(rows: list[dict[str, Any]]) -> str:
    return json.dumps({"columns": {}, "rows": rows})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The small model ran on one and two GPUs, the large one not at all."""
    engines: list[dict[str, Any]] = [
        {"engine": f"{model}:{precision}", "memory.reported_gib": gib}
        for model, gib in ((SMALL, 15.0), (LARGE, 60.0))
        for precision in ("bf16", "nvfp4")
    ]
    (tmp_path / "rollout_x.json").write_text(record(engines))
    ran = (("bf16", 1), ("bf16", 2), ("nvfp4-qat", 1))
    runs = [run(arm, gpus, f"{SMALL}-random") for arm, gpus in ran]
    (tmp_path / "verl_x.json").write_text(record(runs))
    return tmp_path


def rows(folder: Path) -> dict[tuple[str, str, int], list[str]]:
    """The cells after model, arm and GPUs."""
    lines = [line for line in benchmark_text("gpus", folder, "x").splitlines() if "| qwen" in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {(model, arm, int(gpus)): rest for model, arm, gpus, *rest in cells}


def test_steps_beyond_two_measured_numbers_are_computed_and_marked(folder: Path) -> None:
    found = rows(folder)
    assert found[SMALL, "bf16", 2][-3:] == ["1.5", "20.0", "0123456"]
    # 4 + 1.5 + 0.5, then 8 / 8 and 2 + 16 / 8
    assert found[SMALL, "bf16", 8][-3:] == ["*1.5*", "*11.0*", ""]


def test_one_measured_number_gives_no_other_step(folder: Path) -> None:
    found = rows(folder)
    assert found[SMALL, "nvfp4-qat", 1][-2] == "32.0"
    assert found[SMALL, "nvfp4-qat", 2][-2] == ""


def test_a_model_that_never_ran_has_no_times(folder: Path) -> None:
    assert rows(folder)[LARGE, "bf16", 4][-3:] == ["", "", ""]


def test_what_does_not_fit_says_so(folder: Path) -> None:
    actor, weights, *rest = rows(folder)[LARGE, "bf16", 1]
    assert (actor, weights, set(rest)) == ("*284.4*, too much", "60.00", {""})


def test_a_measured_peak_is_shown_and_carried_to_other_numbers(folder: Path) -> None:
    before = rows(folder)
    state = {gpus: float(before[LARGE, "bf16", gpus][0].strip("*")) for gpus in (4, 8)}
    offloaded = float(before[LARGE, "bf16", 4][2].strip("*"))
    peaks = {"actor_peak_gib": state[4] + 7.0, "host_peak_gib": offloaded + 20.0}
    more = [run("bf16", 4, f"{LARGE}-random", **peaks)]
    (folder / "verl_x_30b.json").write_text(record(more))
    found = rows(folder)
    assert found[LARGE, "bf16", 4][0] == f"{state[4] + 7:.1f}"
    assert found[LARGE, "bf16", 4][2] == f"{offloaded + 20:.1f}"
    assert float(found[LARGE, "bf16", 8][0].strip("*")) == pytest.approx(state[8] + 7, abs=0.11)
    assert float(found[LARGE, "bf16", 8][2].strip("*")) == pytest.approx(offloaded + 40, abs=0.11)
    assert found[LARGE, "bf16", 8][-3] == "*1.5*"


def test_an_older_run_has_what_the_first_lacks(folder: Path) -> None:
    older = run("bf16", 1, f"{SMALL}-random", host_peak_gib=70.0)
    older |= {"commit": "abcdef0", "step_s": [99.0, 99.0, 99.0]}
    (folder / "verl_x_before.json").write_text(record([older]))
    assert rows(folder)[SMALL, "bf16", 1][2:] == ["70.0", "1.5", "32.0", "0123456"]
