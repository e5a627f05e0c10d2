"""Names of files and folders mean nothing to a shell: spaces, quotes and commands in them."""

import shlex
import shutil
from pathlib import Path

import pytest

from experiments.study.schema import ROOT
from tests.workflow.programs import SMOKE, copy_repository, run, snakemake

pytestmark = pytest.mark.long

NAME = "a b'$(touch executed);`touch executed` & #.yaml"
BASE = "results/base/tiny/manifest.json"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    folder = tmp_path / "studies $HOME"
    folder.mkdir()
    return Path(shutil.copy(SMOKE, folder / NAME))


def require_nothing_executed(*folders: Path) -> None:
    assert not [path for folder in folders for path in folder.rglob("executed")]


def test_every_rule_quotes_the_study_file(tmp_path: Path, study: Path) -> None:
    done = snakemake("-n", "-p", "--configfile", study, folder=tmp_path / "out put")
    assert done.returncode == 0, done.stderr
    before = "Shell command: "
    lines = (done.stdout + done.stderr).splitlines()
    commands = [line.removeprefix(before) for line in lines if f"{before}python" in line]
    modules = {shlex.split(command)[2].removesuffix(".__main__") for command in commands}
    assert {
        "experiments.base.make",
        "experiments.launch.run",
        "experiments.evaluate.run",
    } <= modules
    assert {"analysis.claims", "analysis.figures", "experiments.tracking.publish"} <= modules
    for command in commands:
        words = shlex.split(command)
        assert words[words.index("--study") + 1] == str(study)
    require_nothing_executed(tmp_path)


def test_rules_run_in_folders_of_any_name(tmp_path: Path, study: Path) -> None:
    repository = tmp_path / "re po $(touch executed)"
    copy_repository(repository)
    results = tmp_path / "out put"
    done = snakemake(BASE, "--configfile", study, folder=results, root=repository)
    assert done.returncode == 0, done.stderr
    assert (results / BASE).exists()
    require_nothing_executed(tmp_path, ROOT)


def test_make_run_takes_a_study_file_of_any_name(tmp_path: Path, study: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\necho "$0" "$@" >> "$LOG"\n')
    (tmp_path / "python").chmod(0o755)
    # doubled for make, as any "$" on its command line
    name = str(study).replace("$", "$$")
    options = ["-f", ROOT / "Makefile", "-o", ".venv/.installed-base", f"BIN={tmp_path}"]
    log = tmp_path / "log"
    done = run(["make", *options, "run", f"STUDY={name}"], cwd=tmp_path, LOG=str(log))
    assert done.returncode == 0, done.stderr
    assert f"python -m experiments.launch.study {study}\n" in log.read_text()
    require_nothing_executed(tmp_path)


def test_braces_in_the_name_of_a_study_file_are_refused(tmp_path: Path) -> None:
    study = shutil.copy(SMOKE, tmp_path / "{model}.yaml")
    done = snakemake("-n", "--configfile", study, folder=tmp_path)
    assert f"error: --configfile: {study}: Snakemake reads braces as wildcards" in done.stderr
    assert "Traceback" not in done.stderr
