"""Runs next to each other: bases first, only what is named; failures are told, signals end all."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from experiments.launch import side_by_side
from experiments.launch.programs import Programs
from experiments.launch.side_by_side import chosen_runs
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES, Study
from experiments.support.cli import INTERRUPTED
from tests.study_files import changed_study, study_content
from tests.unit.launch.conftest import Program, all_of, use

FAILED = "experiments.launch.run failed, see"


def test_a_base_comes_before_its_runs(study: Study, begun: list[Program], tmp_path: Path) -> None:
    assert all_of(study, tmp_path).run_all() == []
    assert sorted(begun) == sorted(
        [("experiments.base make", base) for base in study.bases]
        + [("experiments.launch.run", run.id) for run in study.runs]
        + [("experiments.evaluate.run", run.id) for run in study.runs]
    )
    for run in study.runs:
        base = begun.index(("experiments.base make", study.base_of(run)))
        trained = begun.index(("experiments.launch.run", run.id))
        assert base < trained < begun.index(("experiments.evaluate.run", run.id))


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
    assert all_of(study, tmp_path, runs=runs).run_all() == []
    trained = {name for module, name in begun if module == "experiments.launch.run"}
    assert trained == {run.id for run in runs}
    assert len(trained) == count
    assert {run.cell for run in runs} <= set(cells or study.cells)
    bases = [name for module, name in begun if module == "experiments.base make"]
    assert len(bases) == len(seeds or study.seeds)


def test_an_unknown_cell_or_seed_is_named(study: Study) -> None:
    has_no = "study default-long has no"
    with pytest.raises(ValueError, match=f"--cells: {has_no} cell hi; it has low, high"):
        chosen_runs(study, ["hi", "low"])
    with pytest.raises(ValueError, match=f"--seeds: {has_no} seed 7, 2; it has 0, 1"):
        chosen_runs(study, seeds=[7, 1, 2])


@pytest.mark.parametrize(
    ("codes", "tries", "is_complete"),
    [([1], 1, False), ([1, 0], 2, True), ([2], 3, False), ([130], 3, False)],
    ids=["one try", "another try", "a mistake of the user's", "stopped alone"],
)
def test_a_program_that_fails_is_started_again_where_that_may_help(
    study: Study,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codes: list[int],
    tries: int,
    is_complete: bool,
) -> None:
    run = study.runs[0].id
    starts: list[str] = []

    def end(command: list[str]) -> int:
        if run not in command:
            return 0
        starts.append(command[2])
        return 0 if command[2] == "experiments.evaluate.run" else codes[len(starts) - 1]

    use(monkeypatch, end)
    assert all_of(study, tmp_path, tries=tries).run_all() == ([] if is_complete else [run])
    evaluated = ["experiments.evaluate.run"] * is_complete
    assert starts == ["experiments.launch.run"] * len(codes) + evaluated


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


@pytest.mark.parametrize("random_weights", [False, True], ids=["trained", "random"])
def test_a_study_of_verl_gets_its_data(
    begun: list[Program], tmp_path: Path, random_weights: bool
) -> None:
    study = load_study(STUDIES / "qwen3_moe_smoke.yaml")
    (base,) = study.bases
    assert all_of(study, tmp_path, jobs=1, random_weights=random_weights).run_all() == []
    maker = "experiments.base seeded" if random_weights else "experiments.base make"
    assert begun[:2] == [("experiments.verl.data", "data"), (maker, base)]
    steps = ["experiments.launch.run", "experiments.evaluate.run"][: 1 if random_weights else 2]
    assert begun[2:] == [(step, run.id) for run in study.runs for step in steps]


def test_a_model_may_be_named_data(begun: list[Program], tmp_path: Path) -> None:
    models = {"data": study_content("verl_nano")["models"]["nano-moe-verl"]}
    study = changed_study(tmp_path, {"models": models}, "verl_nano")
    assert all_of(study, tmp_path).run_all() == []
    made = {("experiments.verl.data", "data"), ("experiments.base make", "data")}
    assert made <= set(begun)


@pytest.mark.parametrize("option", ["--jobs", "--begin-within-s"])
@pytest.mark.parametrize("value", ["0", "x"])
def test_numbers_that_cannot_be_are_refused(
    refusal: Callable[..., str], option: str, value: str
) -> None:
    # the last of an option counts
    options = ["--study", "study.yaml", "--jobs", "1", f"{option}={value}"]
    line = refusal(side_by_side.main, *options).splitlines()[-1]
    assert f"error: argument {option}: {value}: needs a " in line and line.endswith("above 0")


# notes its start and fails when it is interrupted; side_by_side takes it for the interpreter
PROGRAM = """#!/bin/sh
trap 'exit {code}' INT
echo "$*" >> {folder}/starts
while :; do sleep 0.1; done
"""
SIDE_BY_SIDE = """
import sys
from experiments.launch.side_by_side import main
from experiments.support.cli import run_cli
sys.executable = sys.argv.pop(1)
run_cli(main)
"""


@contextmanager
def side_by_side_of(folder: Path, code: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has begun PROGRAM, which ends with that code at Ctrl-C."""
    program = folder / "program"
    program.write_text(PROGRAM.format(folder=folder, code=code))
    program.chmod(0o755)
    arguments = ["--study", str(STUDIES / "default_long.yaml"), "--results", str(folder)]
    with subprocess.Popen(
        [sys.executable, "-c", SIDE_BY_SIDE, str(program), *arguments, "--jobs", "1"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        # a shell's background jobs, of which these tests may be one, ignore it
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as study:
        try:
            while not (folder / "starts").exists():
                assert study.poll() is None
                time.sleep(0.05)
            yield study
        finally:
            with suppress(ProcessLookupError):
                os.killpg(study.pid, signal.SIGKILL)  # and what it has begun ends with it


@pytest.mark.parametrize("code", [130, 1], ids=["in a run", "in a run's own child"])
def test_ctrl_c_ends_what_runs_and_begins_nothing(tmp_path: Path, code: int) -> None:
    with side_by_side_of(tmp_path, code) as study:
        os.killpg(study.pid, signal.SIGINT)  # as a terminal does; programs are of other groups
        assert study.wait(timeout=100) == 130
    assert len((tmp_path / "starts").read_text().splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_runs_ends_with_side_by_side_alone(tmp_path: Path, number: signal.Signals) -> None:
    with side_by_side_of(tmp_path, 130) as study:
        (program,) = psutil.Process(study.pid).children()
        study.send_signal(number)
        program.wait(timeout=100)


def test_nothing_begins_after_a_stop(tmp_path: Path) -> None:
    """Nor does a program that another made room for, before it was interrupted."""
    programs = Programs()
    programs.stop()
    with (tmp_path / "log").open("w") as output:
        assert programs.exit_code(["touch", str(tmp_path / "begun")], output) == INTERRUPTED
    assert not (tmp_path / "begun").exists()
