"""side_by_side skips what is complete and does again what is of other settings or damaged."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.launch.digests import training_digests
from experiments.runs.attempts import next_attempt
from experiments.runs.evaluation import Evaluation, write_evaluations
from experiments.runs.inputs import base_digest, data_digest
from experiments.study.load import load_study
from experiments.study.schema import STUDIES, Study
from experiments.support.json_files import read_json, write_json
from tests.records import make_evaluation, make_manifest
from tests.unit.launch.conftest import Program, all_of

pytestmark = pytest.mark.long


def finish(study: Study, results: Path) -> None:
    """Bases, data and runs as the programs leave them, as far as is read of them here."""
    data = results / "data" / study.study
    data.mkdir(parents=True)
    split = {"sha256": "a"}
    described: dict[str, Any] = {"settings": data_digest(study.task), "train": split, "test": split}
    write_json(data / "data.json", described)
    for base in study.bases:
        (results / "base" / base).mkdir(parents=True)
        described = {"settings": base_digest(study, base), "weights": {}, "weight_bytes": 0}
        write_json(results / "base" / base / "manifest.json", described)
    for run in study.runs:
        digests = training_digests(study, run, results)
        named = {"run": run.id, **run._asdict(), "seeds": {"run": run.seed}}
        memory = {"predicted_bf16_gib": 1.0, "measured_bf16_gib": 1.0}
        described = {"config": {"rl": {"steps": study.rl.steps}}, "memory": memory}
        manifest = make_manifest(**named, **described, status="finished", digests=digests)
        manifest.write(next_attempt(results / run.id).folder)
        manifest.write(results / run.id)
        write_evaluations(results / run.id, [evaluation_of(study)])


def evaluation_of(study: Study) -> Evaluation:
    settings = study.evaluation
    asked = {"step": study.rl.steps, "decoding": "sampled", "settings": settings}
    return make_evaluation([0] * settings.prompts, settings.samples_per_prompt, **asked)


def test_what_is_complete_is_skipped(study: Study, begun: list[Program], tmp_path: Path) -> None:
    finish(study, tmp_path)
    half = study.runs[1].id
    (tmp_path / half / "eval.json").unlink()
    assert all_of(study, tmp_path).run_all() == []
    assert begun == [("experiments.launch.run", half), ("experiments.evaluate.run", half)]


@pytest.mark.parametrize(
    "changes",
    [lambda study: {"step": study.rl.steps // 2}, lambda _: {"settings": None}],
    ids=["before its last step", "by an older version"],
)
def test_a_run_evaluated_otherwise_is_evaluated_again(
    study: Study, begun: list[Program], tmp_path: Path, changes: Callable[[Study], dict[str, Any]]
) -> None:
    finish(study, tmp_path)
    run = study.runs[0].id
    write_evaluations(tmp_path / run, [evaluation_of(study).model_copy(update=changes(study))])
    assert all_of(study, tmp_path).run_all() == []
    assert begun == [("experiments.launch.run", run), ("experiments.evaluate.run", run)]


@pytest.mark.parametrize("changes", [{"samples_per_prompt": 5}, {"temperature": 0.9}])
def test_runs_evaluated_with_other_settings_are_evaluated_again(
    study: Study,
    begun: list[Program],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, float],
) -> None:
    finish(study, tmp_path)
    old = study.runs[0]
    other = study.evaluation.model_copy(update=changes)
    changed = study.model_copy(update={"evaluation": other})
    for run in study.runs[1:]:
        write_evaluations(tmp_path / run.id, [evaluation_of(changed)])
    assert all_of(changed, tmp_path).run_all() == []
    assert begun == [("experiments.launch.run", old.id), ("experiments.evaluate.run", old.id)]
    line = f"{tmp_path / old.id}: evaluated with other settings, by an older version or before its "
    assert line in capsys.readouterr().out


def test_runs_of_other_settings_are_trained_again(
    study: Study, begun: list[Program], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(study, tmp_path)
    faster = study.cells["low"].model_copy(update={"lr": 2e-5})
    changed = study.model_copy(update={"cells": study.cells | {"low": faster}})
    assert all_of(changed, tmp_path).run_all() == []
    of_low = {run.id for run in study.runs if run.cell == "low"}
    assert {name for _, name in begun} == of_low and len(begun) == 2 * len(of_low)
    said = [f"{tmp_path / run}: of other settings, code or inputs; trained again" for run in of_low]
    assert set(said) <= set(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("old", "line"),
    [("0" * 64, "of other settings; made again"), (None, "an older version made it; made again")],
    ids=["changed", "older"],
)
def test_data_and_bases_of_other_settings_are_made_again(
    begun: list[Program],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    old: str | None,
    line: str,
) -> None:
    study = load_study(STUDIES / "verl_nano.yaml")
    finish(study, tmp_path)
    dense = next(iter(study.bases))
    stale = {"data": tmp_path / "data" / study.study, dense: tmp_path / "base" / dense}
    for file in (stale["data"] / "data.json", stale[dense] / "manifest.json"):
        write_json(file, read_json(file) | {"settings": old})
    assert all_of(study, tmp_path).run_all() == []
    made = [("experiments.verl.data", "data"), ("experiments.base make", dense)]
    assert sorted(begun) == sorted(made)
    assert {f"{folder}: {line}" for folder in stale.values()} <= set(
        capsys.readouterr().out.splitlines()
    )


def test_the_task_decides_data_and_bases_and_pretraining_its_base() -> None:
    study = load_study(STUDIES / "verl_nano.yaml")
    dense, moe = study.bases
    other = study.model_copy(update={"task": study.task.model_copy(update={"largest": 8})})
    assert data_digest(other.task) != data_digest(study.task)
    assert base_digest(other, moe) != base_digest(study, moe)
    longer = study.models[dense].model_copy(update={"pretrain": None})
    other = study.model_copy(update={"models": study.models | {dense: longer}})
    assert base_digest(other, dense) != base_digest(study, dense)
    assert base_digest(other, moe) == base_digest(study, moe)


@pytest.mark.parametrize("file", ["base/nano-dense_seed0", "nano-dense_bf16.low_seed0"])
def test_a_damaged_file_is_said_and_ends_no_other_work(
    study: Study,
    begun: list[Program],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    file: str,
) -> None:
    finish(study, tmp_path)
    other = study.runs[-1]
    (tmp_path / other.id / "eval.json").unlink()
    damaged = tmp_path / file / "manifest.json"
    for path in (damaged, *damaged.parent.glob("attempts/*/manifest.json")):
        path.write_text("{")
    missing = all_of(study, tmp_path).run_all()
    assert damaged.parent.name in missing and other.id not in missing
    assert re.search(rf"{damaged.parent.name}: .*manifest.json: not JSON", capsys.readouterr().out)
    assert ("experiments.evaluate.run", other.id) in begun
