"""The record of verl's steps: medians without the first step, largest memory over all."""

import json
from pathlib import Path

import pytest

from experiments.benchmarks.verl_steps import COLUMNS, MEMORY, write_record
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
    (found,) = json.loads((tmp_path / "record.json").read_text())["runs"]
    assert (found["arm"], found["steps"]) == ("nvfp4-qat", 3)
    assert found["step_s"] == {"median": 15.0, "low": 10.0, "high": 20.0}
    assert found["outside_steps_s"] == WALL_S - 80.0
    assert found["memory"]["actor_peak_gib"] == 5.0
    assert "host_peak_gib" not in found["memory"]


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
