"""All runs of verl studies in turn: a run without a second step is in no record."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.benchmarks.verl_arms import run_arms
from experiments.benchmarks.verl_steps import COLUMNS
from experiments.runs.attempts import next_attempt, write_results
from experiments.study.load import load_study
from experiments.study.schema import STUDIES
from qat_core.rl.metric_names import STEP_TIME
from tests.manifests import make_manifest

FILE = STUDIES / "qwen3_moe_replay.yaml"
STUDY = load_study(FILE)
BF16, QAT = (run.id for run in STUDY.runs)
NEVER, STEP_S = float("inf"), 10.0


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs in the order in which they were begun; the BF16 arm's ends after its first step."""
    names: list[str] = []

    def pretend(command: list[str], **_: object) -> SimpleNamespace:
        options = dict(zip(command[4::2], command[5::2], strict=True))
        results, run = Path(options["--results"]), STUDY.find_run(options["--run"])
        assert (results / "base" / run.model / "config.json").exists()
        assert (results / "data" / STUDY.study / "train.parquet").exists()
        names.append(run.id)
        steps = 1 if run.arm == "bf16" else STUDY.rl.steps
        attempt = next_attempt(results / run.id)
        for step in range(1, steps + 1):
            attempt.append({"step": step, STEP_TIME: STEP_S} | dict.fromkeys(COLUMNS.values(), 1.0))
        make_manifest(
            run=run.id,
            **{"model": run.model, "arm": run.arm, "config": STUDY.training_config(run)},
            **{"status": "failed" if steps == 1 else "finished", "wall_s": 100.0},
        ).write(attempt.folder)
        if steps == STUDY.rl.steps:
            write_results(results / run.id)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", pretend)
    return names


def test_every_run_is_begun_and_those_with_a_second_step_are_recorded(
    begun: list[str], tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    assert run_arms([FILE], tmp_path, record, deadline=NEVER) == [BF16]
    assert begun == [BF16, QAT]
    (found,) = json.loads(record.read_text())["runs"]
    assert (found["arm"], found["steps"], found["step_s"]["median"]) == ("nvfp4-qat", 4, STEP_S)
    assert found["outside_steps_s"] == 100.0 - 4 * STEP_S


def test_after_the_deadline_nothing_is_begun(begun: list[str], tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    assert run_arms([FILE], tmp_path, record, deadline=0.0) == [BF16, QAT]
    assert begun == [] and not record.exists()
