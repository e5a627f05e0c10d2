"""Bad input ends as one line that names file, key and hint, with no traceback and no results."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.study.schema import ROOT
from tests.study_files import write_study
from tests.workflow.programs import ENVIRONMENT, SMOKE, Done, module, run, snakemake

pytestmark = pytest.mark.long

TINY: dict[str, Any] = json.loads((ROOT / "tests" / "workflow" / "tiny.json").read_text())


def assert_one_line(done: Done, line: str) -> None:
    assert done.returncode != 0
    errors = [text for text in done.stderr.splitlines() if "error" in text.lower()]
    assert len(errors) == 1 and line in errors[0], done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_snakemake_refuses_study(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"rl/stepz": 3}, SMOKE)
    done = snakemake("--configfile", study, folder=tmp_path)
    assert_one_line(done, "study.yaml: rl.stepz: unknown key; did you mean steps?")
    assert not (tmp_path / "results").exists() and not (tmp_path / "mlflow.db").exists()


def study_of_model(folder: Path, config: str) -> tuple[Path, Path]:
    """The smoke study with such a configuration of its model, and that of the model."""
    file = folder / "model.json"
    file.write_text(config)
    return write_study(folder, {"models/tiny/config": str(file)}, SMOKE), file


def test_dry_run_refuses_a_damaged_model_config(tmp_path: Path) -> None:
    study, file = study_of_model(tmp_path, "{")
    done = snakemake("-n", "--configfile", study, folder=tmp_path)
    assert_one_line(done, f"error: {file}: not JSON (Expecting property name")
    assert "; correct it, or name another file in models.tiny.config" in done.stderr


def test_program_that_fails_within_the_workflow_is_said_to_fail(tmp_path: Path) -> None:
    study, file = study_of_model(tmp_path, json.dumps(TINY | {"vocab_size": 8}))
    done = snakemake("--configfile", study, folder=tmp_path)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert f"error: {file}: vocab_size: 8 is less than the tokenizer's" in output
    # a program behind `| tee` whose exit code was lost would have "completed successfully"
    assert "MissingOutputException" not in output


@pytest.mark.parametrize(
    ("program", "text", "line"),
    [("run", "rl:\n\tsteps: 1\n", "line 2: "), ("report", "a: 1\n", "study: missing; add it")],
)
def test_make_names_what_is_wrong_in_a_file(
    tmp_path: Path, program: str, text: str, line: str
) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(text)
    options = ["-o", ".venv/.installed-base", f"BIN={Path(sys.executable).parent}"]
    done = run(["make", *options, program, f"STUDY={study}"])
    assert done.returncode == 2 and "Traceback" not in done.stderr + done.stdout
    assert done.stderr.startswith(f"error: {study}: {line}")


SLOW = "open('started', 'w')\nimport time; time.sleep(600)\n"  # a workflow


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The program that runs a study, in the midst of a slow workflow."""
    (tmp_path / "Snakefile").write_text(SLOW)
    with subprocess.Popen(
        [sys.executable, "-m", "experiments.launch.study", str(SMOKE)],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        while not (tmp_path / "started").exists():
            assert process.poll() is None
            time.sleep(0.05)
        try:
            yield process
        finally:
            process.kill()


def test_a_study_is_made_by_one_process_at_a_time(
    tmp_path: Path, started: subprocess.Popen[str]
) -> None:
    make = ("experiments.launch.study", SMOKE, "--cores", "1", "--snakefile", ROOT / "Snakefile")
    second = module(*make, folder=tmp_path)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    line = "error: results/studies/smoke: another process makes it; wait for it or end it\n"
    assert (second.returncode, second.stderr) == (2, line)
    again = module(*make, "-n", folder=tmp_path)
    assert again.returncode == 0 and "Study smoke: 2 runs" in again.stderr


def test_a_study_that_is_stopped_says_so_in_one_line(started: subprocess.Popen[str]) -> None:
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does
    _, said = started.communicate()
    assert (started.returncode, said) == (130, "stopped: SIGINT; the same command goes on\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--config", "seeds=3"), "--config: settings come from the study file; change it there"),
        (("--configfile", SMOKE, SMOKE), "--configfile: 2 files given; name one study file"),
    ],
    ids=["settings", "two files"],
)
def test_a_study_is_one_file(tmp_path: Path, arguments: tuple[object, ...], line: str) -> None:
    assert_one_line(snakemake(*arguments, folder=tmp_path), line)


PROGRAM_ERRORS = {
    "no base checkpoint": (
        ("experiments.launch.run", "--run", "tiny_bf16_seed0", "--log", "log"),
        "results/base/tiny/manifest.json: no base checkpoint; make it with",
    ),
    "no verl command": (
        ("experiments.verl.command", "--run", "tiny_bf16_seed0"),
        "smoke.yaml: trainer: local has no verl command; name a study with trainer: verl",
    ),
    "unknown model": (
        ("experiments.base make", "--model", "x", "--out", "out"),
        "--model: x is not in the study; it has tiny",
    ),
    "no results": (
        ("analysis.claims", "--results", "results", "--out", "out"),
        "results/tiny_bf16_seed0/manifest.json: missing; run the study",
    ),
    "nothing to record": (
        ("analysis.record", "--records", "records"),
        "results/tiny_bf16_seed0/manifest.json: missing; run study smoke to its end first",
    ),
}


@pytest.mark.parametrize(("command", "line"), PROGRAM_ERRORS.values(), ids=PROGRAM_ERRORS.keys())
def test_program_refuses(tmp_path: Path, command: tuple[str, ...], line: str) -> None:
    name, *arguments = command
    done = module(name, "--study", SMOKE, *arguments, folder=tmp_path)
    assert_one_line(done, line)
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_rebuild_refuses_a_missing_folder(tmp_path: Path) -> None:
    done = module("experiments.tracking", "rebuild", "none", folder=tmp_path)
    assert_one_line(done, "none: no such folder; name results or a folder of records")
