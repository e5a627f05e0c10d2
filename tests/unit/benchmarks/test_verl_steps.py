"""The record of verl's steps: medians without the first step, largest memory over all."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks.verl_steps import COLUMNS, IN_PLACE, MEMORY, shown, write_record
from experiments.rl.metric_names import STEP_TIME
from experiments.runs.attempts import next_attempt
from experiments.study.load import load_study
from experiments.study.schema import STUDIES
from tests.manifests import make_manifest

STUDY = load_study(STUDIES / "qwen3_moe_replay.yaml")
BF16, QAT = STUDY.runs
WALL_S = 100.0


def write_run(results: Path, arm: int, steps: int, **memory: list[float | None]) -> Path:
    """A run whose first step took 50 s and the others 10, 20 and so on."""
    run = STUDY.runs[arm]
    attempt = next_attempt(results / run.id)
    for step in range(steps):
        columns = dict.fromkeys(COLUMNS.values(), 1.0)
        peaks = {MEMORY[name]: values[step] for name, values in memory.items()}
        attempt.append({"step": step + 1, STEP_TIME: 10.0 * step or 50.0} | columns | peaks)
    make_manifest(
        **{"run": run.id, "model": run.model, "arm": run.arm, "wall_s": WALL_S},
        config=STUDY.training_config(run),
    ).write(attempt.folder)
    return results / run.id


def test_a_record_has_every_run_with_a_second_step(tmp_path: Path) -> None:
    peaks = {"actor_peak_gib": [3.0, 5.0, None], "host_peak_gib": [None, None, None]}
    folders = [write_run(tmp_path, 0, 1), write_run(tmp_path, 1, 3, **peaks)]
    write_record(tmp_path / "record.json", folders)
    (found,) = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert (found["arm"], found["steps"], found["mean_of_bf16"]) == ("nvfp4-qat", 3, None)
    assert found["step_s"] == [10.0, 15.0, 20.0]
    assert found["outside_steps_s"] == WALL_S - 80.0
    assert (found["memory.actor_peak_gib"], found["memory.host_peak_gib"]) == (5.0, None)


@pytest.mark.parametrize(
    ("arm", "environment", "setting"),
    [
        ("qat", {}, "qat"),
        ("qat", {IN_PLACE: "0"}, "qat, reload"),
        ("qat", {"QAT_CORE_EXPERTS_KERNEL": "humming"}, "qat, experts by humming"),
        ("bf16", {IN_PLACE: "0"}, "bf16"),
    ],
)
def test_a_run_is_named_by_what_served_it_and_compared_with_bf16_of_its_code(
    arm: str, environment: dict[str, str], setting: str
) -> None:
    def run(arm: str, k3: float, commit: str = "0123456789") -> dict[str, Any]:
        found = {"model": "m", "arm": arm, "gpus": 1, "steps": 4, "planned_steps": 20}
        found |= {"git": {"commit": commit}, "environment": environment}
        return found | {"memory": {}, "mean_k3_kl": k3, "k3_kl": [0.0, 2 * k3, 9.0]}

    own = run(arm, 6e-5)
    row = shown(own, [run("bf16", 1e-2, "abcdef012"), run("bf16", 2e-5), own])
    assert (row["setting"], row["progress"], row["commit"]) == (setting, "4 of 20", "0123456")
    assert row["mean_of_bf16"] == row["median_of_bf16"] == pytest.approx(3.0)


def test_without_a_second_step_there_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run has a second step"):
        write_record(tmp_path / "record.json", [write_run(tmp_path, 0, 1)])


def test_runs_of_the_local_trainer_are_refused(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 1, 3)
    path = run_dir / "attempts" / "1" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"] = {"trainer": "local", "rl": manifest["config"]["rl"]}
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=f"{run_dir}: not a run of verl, its trainer is local; na"):
        write_record(tmp_path / "record.json", [run_dir])
