"""Bad input ends as one line that names file, key and hint, with no traceback and no results."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.study.schema import ROOT, STUDIES
from tests.workflow.programs import ENVIRONMENT, SMOKE, Done, module, run, snakemake

pytestmark = pytest.mark.long

WriteStudy = Callable[..., Path]
TINY: dict[str, Any] = json.loads((ROOT / "tests" / "workflow" / "tiny.json").read_text())


def assert_one_line(done: Done, line: str) -> None:
    assert done.returncode != 0
    errors = [text for text in done.stderr.splitlines() if "error" in text.lower()]
    assert len(errors) == 1 and line in errors[0], done.stderr
    assert "Traceback" not in done.stderr + done.stdout


STUDY_ERRORS = {
    "unknown key": ({"rl__stepz": 3}, "study.yaml: rl.stepz: unknown key; did you mean steps?"),
    "wrong type": ({"rl__steps": "x"}, "study.yaml: rl.steps: 'x' does not fit, it should be a"),
    "missing file": ({"models__tiny__config": "none"}, "study.yaml: models.tiny.config: no file"),
    "unknown arm": ({"arms": ["fp5"]}, "study.yaml: arms.0: 'fp5' is not allowed; use 'bf16'"),
    "seed twice": ({"seeds": [0, 0]}, "study.yaml: seeds: 0 is listed twice; remove one"),
}


@pytest.mark.parametrize(("changes", "line"), STUDY_ERRORS.values(), ids=STUDY_ERRORS.keys())
def test_snakemake_refuses_study(
    tmp_path: Path, write_study: WriteStudy, changes: dict[str, Any], line: str
) -> None:
    done = snakemake("--configfile", write_study(**changes), folder=tmp_path)
    assert_one_line(done, line)
    assert not (tmp_path / "results").exists() and not (tmp_path / "mlflow.db").exists()


MODEL_ERRORS = {
    "no quantizable layer": (
        {"num_hidden_layers": 0},
        "no linear or expert weight to quantize; use the bf16 arm alone",
    ),
    "input size": (
        {"hidden_size": 40},
        "model.layers.0.self_attn.q_proj.weight: input size 40 is not a multiple of 16; change",
    ),
    "architecture": (
        {"model_type": "gpt2"},
        "model_type: 'gpt2' is not one of llama, qwen2",
    ),
    "missing size": (
        {"hidden_size": None},
        "hidden_size: missing; correct it, or name another file in",
    ),
}


@pytest.mark.parametrize(("changes", "line"), MODEL_ERRORS.values(), ids=MODEL_ERRORS.keys())
def test_snakemake_refuses_model(
    tmp_path: Path, write_study: WriteStudy, changes: dict[str, Any], line: str
) -> None:
    config = {key: value for key, value in (TINY | changes).items() if value is not None}
    file = tmp_path / "model.json"
    file.write_text(json.dumps(config))
    study = write_study(models__tiny__config=str(file))
    assert_one_line(snakemake("--configfile", study, folder=tmp_path), f"{file}: {line}")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [("{", "not JSON (Expecting property name"), ("[1]", "not a mapping of keys to values;")],
)
def test_dry_run_refuses_a_damaged_model_config(
    tmp_path: Path, write_study: WriteStudy, text: str, line: str
) -> None:
    file = tmp_path / "model.json"
    file.write_text(text)
    study = write_study(models__tiny__config=str(file))
    done = snakemake("-n", "--configfile", study, folder=tmp_path)
    assert_one_line(done, f"error: {file}: {line}")
    assert "; correct it, or name another file in models.tiny.config" in done.stderr


def test_program_that_fails_within_the_workflow_is_said_to_fail(
    tmp_path: Path, write_study: WriteStudy
) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps(TINY | {"vocab_size": 8}))
    study = write_study(models__tiny__config=str(file))
    done = snakemake("--configfile", study, folder=tmp_path)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert f"error: {file}: vocab_size: 8 is less than the tokenizer's" in output
    # a program behind `| tee` whose exit code was lost would have "completed successfully"
    assert "MissingOutputException" not in output


BAD_YAML = {
    "unclosed bracket": (b"rl: [1\n", "line 2: expected ',' or ']'"),
    "tab": (b"rl:\n\tsteps: 1\n", "line 2: found character '\\t' that cannot start any token"),
    "unknown tag": (b"rl: !x 1\n", "line 1: could not determine a constructor for the tag '!x'"),
    "unknown alias": (b"rl: *x\n", "line 1: found undefined alias 'x'"),
    "empty": (b"", "not a mapping of keys; see experiments/studies/default.yaml"),
    "Latin-1": (b"study: caf\xe9\n", "not YAML text: 'utf-8' codec can't decode byte 0xe9"),
    "binary": (bytes(range(256)), "not YAML text: "),
}


@pytest.mark.parametrize(("content", "line"), BAD_YAML.values(), ids=BAD_YAML.keys())
def test_make_run_names_file_and_line_of_bad_yaml(
    tmp_path: Path, content: bytes, line: str
) -> None:
    study = tmp_path / "study.yaml"
    study.write_bytes(content)
    options = ["-o", ".venv/.installed-base", f"BIN={Path(sys.executable).parent}"]
    done = run(["make", *options, "run", f"STUDY={study}"])
    assert done.returncode != 0
    errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith(f"error: {study}: {line}"), done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_a_study_is_made_by_one_process_at_a_time(tmp_path: Path) -> None:
    slow = tmp_path / "Snakefile"
    slow.write_text("open('started', 'w')\nimport time; time.sleep(600)\n")
    make = ("experiments.launch.study", SMOKE, "--cores", "1", "--snakefile")
    command = [sys.executable, "-m", *map(str, make), str(slow)]
    first = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    while not (tmp_path / "started").exists():
        assert first.poll() is None
        time.sleep(0.05)
    second = module(*make, ROOT / "Snakefile", folder=tmp_path)
    first.kill()
    first.wait()
    line = "error: results/studies/smoke: another process makes it; wait for it or end it\n"
    assert (second.returncode, second.stderr) == (2, line)
    again = module(*make, ROOT / "Snakefile", "-n", folder=tmp_path)
    assert again.returncode == 0 and "Study smoke: 2 runs" in again.stderr


def test_settings_on_the_command_line_are_refused(tmp_path: Path) -> None:
    done = snakemake("--config", "seeds=3", folder=tmp_path)
    assert_one_line(done, "--config: settings come from the study file; change it there")


def test_two_study_files_are_refused(tmp_path: Path) -> None:
    done = snakemake("--configfile", SMOKE, STUDIES / "default.yaml", folder=tmp_path)
    assert_one_line(done, "--configfile: 2 files given; name one study file")


PROGRAM_ERRORS = {
    "unknown run": (
        ("experiments.launch.run", "--run", "x", "--log", "log"),
        "--run: study smoke has no run 'x'; it has tiny_bf16_seed0, tiny_nvfp4-qat_seed0",
    ),
    "no base checkpoint": (
        ("experiments.launch.run", "--run", "tiny_bf16_seed0", "--log", "log"),
        "results/base/tiny/manifest.json: no base checkpoint; make it with",
    ),
    "no verl command": (
        ("experiments.verl.command", "--run", "tiny_bf16_seed0"),
        "smoke.yaml: trainer: local has no verl command; name a study with trainer: verl",
    ),
    "unknown model": (
        ("experiments.base.make", "--model", "x", "--out", "out"),
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


@pytest.mark.parametrize(
    ("command", "file", "line"),
    [
        (
            ("experiments.launch.run", "--run", "tiny_bf16_seed0", "--log", "log"),
            "base/tiny/manifest.json",
            "weights: missing; delete it and run the study again",
        ),
    ],
    ids=["launch"],
)
def test_program_refuses_a_damaged_file(
    tmp_path: Path, command: tuple[str, ...], file: str, line: str
) -> None:
    damaged = tmp_path / "results" / file
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{}")
    name, *arguments = command
    done = module(name, "--study", SMOKE, *arguments, folder=tmp_path)
    assert_one_line(done, f"error: results/{file}: {line}")
    assert done.returncode == 2


def test_rebuild_refuses_a_missing_folder(tmp_path: Path) -> None:
    done = module("experiments.tracking.publish", "rebuild", "none", folder=tmp_path)
    assert_one_line(done, "none: no such folder; name results or a folder of records")
