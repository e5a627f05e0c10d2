"""Runs next to each other: bases first, what is complete is skipped, failures are reported."""

import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.launch import side_by_side
from experiments.launch.digests import training_digests
from experiments.launch.programs import Programs
from experiments.launch.side_by_side import SideBySide, chosen_runs
from experiments.runs.attempts import next_attempt
from experiments.runs.base_manifest import base_digest
from experiments.runs.data_manifest import data_digest
from experiments.runs.evaluation import Evaluation, write_evaluations
from experiments.study.load import load_study
from experiments.study.schema import STUDIES, Study
from experiments.support.json_files import read_json, write_json
from tests.manifests import make_manifest

FAILED = "experiments.launch.run failed, see"
Program = tuple[str, str]  # module, and the run or base that it is for


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Two cells of one model and two arms, two seeds with bases of their own."""
    content = yaml.safe_load((STUDIES / "default.yaml").read_text())
    del content["models"]["nano-moe"]
    cells = {"low": {"lr": 1e-5}, "high": {"lr": 1e-3}}
    content |= {"arms": ["bf16", "nvfp4-qat"], "seeds": [0, 1], "own_base": True, "cells": cells}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_study(path)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs in the order in which they were begun; they write what the true ones write."""
    programs: list[Program] = []
    lock = threading.Lock()

    def pretend(command: list[str]) -> int:
        options = dict(zip(command[3::2], command[4::2], strict=False))
        name = options.get("--run") or options.get("--model") or "data"
        with lock:
            programs.append((command[2], name))
        return 0

    use(monkeypatch, pretend)
    return programs


def use(monkeypatch: pytest.MonkeyPatch, program: Callable[[list[str]], int]) -> None:
    """In the place of every program."""

    monkeypatch.setattr(Programs, "exit_code", lambda _, command, output: program(command))


def all_of(study: Study, folder: Path, deadline: float = float("inf")) -> SideBySide:
    return SideBySide(study, Path("study.yaml"), folder, jobs=3, deadline=deadline)


def test_a_base_comes_before_its_runs(study: Study, begun: list[Program], tmp_path: Path) -> None:
    assert all_of(study, tmp_path).run_all() == []
    assert sorted(begun) == sorted(
        [("experiments.base.make", base) for base in study.bases]
        + [("experiments.launch.run", run.id) for run in study.runs]
        + [("experiments.evaluate.run", run.id) for run in study.runs]
    )
    for run in study.runs:
        base = begun.index(("experiments.base.make", study.base_of(run)))
        trained = begun.index(("experiments.launch.run", run.id))
        assert base < trained < begun.index(("experiments.evaluate.run", run.id))


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
    counts = study.evaluation.model_dump(include={"prompts", "samples_per_prompt"})
    wrong = [0] * study.evaluation.prompts
    return Evaluation(
        step=study.rl.steps,
        precision="bf16",
        decoding="sampled",
        **counts,
        accuracy=0.0,
        correct=wrong,
        response_tokens_mean=1.0,
        settings=study.evaluation,
    )


def test_what_is_complete_is_skipped(study: Study, begun: list[Program], tmp_path: Path) -> None:
    finish(study, tmp_path)
    half = study.runs[1].id
    (tmp_path / half / "eval.json").unlink()
    assert all_of(study, tmp_path).run_all() == []
    assert begun == [("experiments.launch.run", half), ("experiments.evaluate.run", half)]


def test_a_run_evaluated_before_its_last_step_is_evaluated_again(
    study: Study, begun: list[Program], tmp_path: Path
) -> None:
    finish(study, tmp_path)
    early = study.runs[0].id
    halfway = evaluation_of(study).model_copy(update={"step": study.rl.steps // 2})
    write_evaluations(tmp_path / early, [halfway])
    assert all_of(study, tmp_path).run_all() == []
    assert begun == [("experiments.launch.run", early), ("experiments.evaluate.run", early)]


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


def test_evaluations_of_an_older_version_are_made_again(
    study: Study, begun: list[Program], tmp_path: Path
) -> None:
    finish(study, tmp_path)
    old = study.runs[0]
    write_evaluations(
        tmp_path / old.id, [evaluation_of(study).model_copy(update={"settings": None})]
    )
    assert all_of(study, tmp_path).run_all() == []
    assert begun == [("experiments.launch.run", old.id), ("experiments.evaluate.run", old.id)]


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
    made = [("experiments.verl.data", "data"), ("experiments.base.make", dense)]
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


def test_after_the_deadline_nothing_is_begun(
    study: Study, begun: list[Program], tmp_path: Path
) -> None:
    missing = all_of(study, tmp_path, deadline=time.monotonic() - 1).run_all()
    assert missing == [*study.bases, *(run.id for run in study.runs)]
    assert begun == []


def fail_for(name: str) -> Callable[[list[str]], int]:
    return lambda command: int(name in command)


def test_a_failed_run_is_told_and_not_evaluated(
    study: Study,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing = study.runs[2].id
    use(monkeypatch, fail_for(failing))
    assert all_of(study, tmp_path).run_all() == [failing]
    reported = [line for line in capsys.readouterr().out.splitlines() if failing in line]
    assert reported == [f"{failing}: {FAILED} {tmp_path}/logs/{failing}.log"]


def test_without_its_base_no_run_is_begun(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, fail_for("nano-dense_seed1"))
    lost = ["nano-dense_seed1", *(run.id for run in study.runs if run.seed == 1)]
    assert all_of(study, tmp_path).run_all() == lost


@pytest.mark.parametrize(
    ("cells", "seeds", "count"), [(["high"], [], 4), ([], [1], 4), (["high"], [1], 2)]
)
def test_only_what_is_named_is_run(
    study: Study,
    begun: list[Program],
    tmp_path: Path,
    cells: list[str],
    seeds: list[int],
    count: int,
) -> None:
    runs = chosen_runs(study, cells, seeds)
    assert SideBySide(study, Path("study.yaml"), tmp_path, 3, float("inf"), runs).run_all() == []
    trained = {name for module, name in begun if module == "experiments.launch.run"}
    assert trained == {run.id for run in runs}
    assert len(trained) == count
    assert {run.cell for run in runs} <= set(cells or study.cells)
    bases = [name for module, name in begun if module == "experiments.base.make"]
    assert len(bases) == len(seeds or study.seeds)


def test_an_unknown_cell_is_named(study: Study) -> None:
    with pytest.raises(
        ValueError, match=r"--cells: study default has no cell hi; it has high, low"
    ):
        chosen_runs(study, ["hi", "low"])


def test_an_unknown_seed_is_named(study: Study) -> None:
    with pytest.raises(ValueError, match=r"--seeds: study default has no seed 7, 2; it has 0, 1"):
        chosen_runs(study, seeds=[7, 1, 2])


@pytest.mark.parametrize(("tries", "is_complete"), [(1, False), (2, True)])
def test_a_program_that_fails_once_is_started_again(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: int, is_complete: bool
) -> None:
    run = study.runs[0].id
    starts: list[str] = []

    def fail_once(command: list[str]) -> int:
        is_first = run in command and not starts
        if run in command:
            starts.append(command[2])
        return int(is_first)

    use(monkeypatch, fail_once)
    programs = SideBySide(study, Path("study.yaml"), tmp_path, 3, float("inf"), tries=tries)
    assert programs.run_all() == ([] if is_complete else [run])
    assert starts == ["experiments.launch.run"] * tries + ["experiments.evaluate.run"] * is_complete


def test_a_mistake_of_the_users_is_not_tried_again(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = study.runs[0].id
    starts: list[str] = []

    def refuse(command: list[str]) -> int:
        starts.extend(command[2:3] * (run in command))
        return 2 * (run in command)

    use(monkeypatch, refuse)
    programs = SideBySide(study, Path("study.yaml"), tmp_path, 3, float("inf"), tries=3)
    assert programs.run_all() == [run]
    assert starts == ["experiments.launch.run"]


def test_a_run_that_is_stopped_alone_is_not_tried_again(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[str] = []

    def stop(command: list[str]) -> int:
        is_stopped = study.runs[0].id in command
        starts.extend(command[2:3] * is_stopped)
        return 130 * is_stopped

    use(monkeypatch, stop)
    programs = SideBySide(study, Path("study.yaml"), tmp_path, 3, float("inf"), tries=3)
    assert programs.run_all() == [study.runs[0].id]
    assert starts == ["experiments.launch.run"]


@pytest.mark.parametrize(("failing", "code"), [("nano-dense_bf16.low_seed0", 1), ("none", 0)])
def test_the_exit_code_says_whether_all_is_complete(
    study: Study,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: str,
    code: int,
) -> None:
    use(monkeypatch, fail_for(failing))
    monkeypatch.setattr(side_by_side, "load_study", lambda _: study)
    options = ["--study", "study.yaml", "--results", str(tmp_path), "--jobs", "3"]
    monkeypatch.setattr(sys, "argv", ["side_by_side", *options])
    ended = pytest.raises(SystemExit) if code else nullcontext()
    with ended as caught:
        side_by_side.main()
    assert (caught.value.code if caught else 0) == code
    missing = f"8 runs in all, not complete: {failing}"
    assert capsys.readouterr().out.splitlines()[-1] == missing


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


@pytest.mark.parametrize("random_weights", [False, True], ids=["trained", "random"])
def test_a_study_of_verl_gets_its_data(
    begun: list[Program], tmp_path: Path, random_weights: bool
) -> None:
    study = load_study(STUDIES / "qwen3_moe_smoke.yaml")
    (base,) = study.bases
    programs = SideBySide(
        study, Path("study.yaml"), tmp_path, 1, float("inf"), random_weights=random_weights
    )
    assert programs.run_all() == []
    maker = "experiments.benchmarks.seeded_base" if random_weights else "experiments.base.make"
    assert begun[:2] == [("experiments.verl.data", "data"), (maker, base)]
    steps = ["experiments.launch.run", "experiments.evaluate.run"][: 1 if random_weights else 2]
    assert begun[2:] == [(step, run.id) for run in study.runs for step in steps]


def test_a_model_may_be_named_data(begun: list[Program], tmp_path: Path) -> None:
    content = yaml.safe_load((STUDIES / "verl_nano.yaml").read_text())
    content["models"] = {"data": content["models"]["nano-moe-verl"]}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    assert all_of(load_study(path), tmp_path).run_all() == []
    made = {("experiments.verl.data", "data"), ("experiments.base.make", "data")}
    assert made <= set(begun)


@pytest.mark.parametrize("option", ["--jobs", "--begin-within-s"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "-inf", "x"])
def test_numbers_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    # the last of an option counts
    options = ["--study", "study.yaml", "--jobs", "1", f"{option}={value}"]
    monkeypatch.setattr(sys, "argv", ["side_by_side", *options])
    with pytest.raises(SystemExit) as ended:
        side_by_side.main()
    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"error: argument {option}: {value}: needs a " in line and line.endswith("above 0")
