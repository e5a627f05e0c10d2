"""What Snakemake would run, and that names of files and folders mean nothing to a shell."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from experiments.runs.manifest import MANIFEST
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES
from tests.workflow.programs import (
    SLOW_IMPORTS,
    SMOKE,
    copy_repository,
    imported,
    run,
    snakemake,
    write_nvidia_smi,
)

pytestmark = pytest.mark.long


# design.md, from shapes alone
QWEN3_LINES = {
    "qwen3-8b bf16": "15.26 GiB",
    "qwen3-8b nvfp4-qat": "15.26 GiB -> 5.96 GiB",
    "qwen3-8b nvfp4-qat-ffn": "15.26 GiB -> 7.98 GiB",
    "qwen3-30b-a3b bf16": "56.87 GiB",
    "qwen3-30b-a3b nvfp4-noqat": "56.87 GiB -> 16.85 GiB",
    "qwen3-30b-a3b nvfp4-qat-ffn": "56.87 GiB -> 18.06 GiB",
}


def test_qwen3_dry_run_plans_all_runs_and_predicts_memory(tmp_path: Path) -> None:
    study = STUDIES / "qwen3.yaml"
    done = snakemake("-n", "--configfile", study, folder=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0, done.stderr
    assert not SLOW_IMPORTS & imported(done)
    lines = [" ".join(line.split()) for line in done.stderr.splitlines()]
    for arm, memory in QWEN3_LINES.items():
        assert any(line.startswith(arm + " ") and memory in line for line in lines), arm
    assert "Making the data of study qwen3" in done.stdout + done.stderr
    for planned in load_study(study).runs:
        assert f"Training {planned.id}" in done.stdout + done.stderr
    assert not (tmp_path / "results").exists()


def test_default_study_is_planned_without_a_configfile(tmp_path: Path) -> None:
    done = snakemake("-n", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = load_study(STUDIES / "default.yaml").runs
    assert f"Study default: {len(runs)} runs" in done.stderr


def test_a_study_that_cannot_be_judged_is_refused_when_it_is_planned(tmp_path: Path) -> None:
    done = snakemake("-n", "--configfile", STUDIES / "qwen3_moe_smoke.yaml", folder=tmp_path)
    assert done.returncode != 0
    (error,) = (line for line in done.stderr.splitlines() if "error" in line.lower())
    assert error.startswith("error: study qwen3-moe-smoke: rl.save_every: 5 is more than rl.steps")
    assert "Traceback" not in done.stderr


def test_cuda_study_is_refused_without_enough_gpus(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="needs requirements/engines.txt")
    study = STUDIES / "qwen3.yaml"
    done = snakemake("--configfile", study, folder=tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode != 0
    assert "device: cuda: the run takes 8 GPUs and this machine shows 1; set gpus" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists() and not (tmp_path / "mlflow.db").exists()


def test_jobs_of_a_cuda_study_share_all_visible_gpus(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="needs requirements/engines.txt")
    study = STUDIES / "qwen3_smoke.yaml"
    data = "results/data/qwen3-smoke/data.json"  # made without a GPU
    options = (data, "--quiet", "reason", "--configfile", study)
    done = snakemake(*options, folder=tmp_path, CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert done.returncode == 0, done.stderr
    assert 'gpu=Resource("gpu", 4)' in done.stderr


def test_runs_that_share_a_gpu_begin_together_on_16_cores(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="needs requirements/engines.txt")
    path = STUDIES / "collapse_verl.yaml"
    study = load_study(path)
    runs = [
        f"results/{run.id}/{file}" for run in study.runs for file in ("metrics.jsonl", MANIFEST)
    ]
    bases = [
        f"results/base/{base}/{file}" for base in study.bases for file in ("config.json", MANIFEST)
    ]
    parts = ("data.json", "train.parquet", "test.parquet")
    for name in [*runs, *bases, *(f"results/data/{study.study}/{part}" for part in parts)]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    smi = write_nvidia_smi(tmp_path / "bin", {"GPU-a": "143771"})
    gpu = {"CUDA_VISIBLE_DEVICES": "0", "PATH": f"{smi.parent}:{os.environ['PATH']}"}
    # a dry run chooses no jobs
    options = ("--touch", "--forcerun", "train", "--cores", "16", "--resources", "gpu=3")
    files = ("--configfile", path, "--", *runs)
    done = snakemake(*options, *files, folder=tmp_path, **gpu)
    assert done.returncode == 0, done.stderr
    assert f"Execute {len(study.runs)} jobs" in done.stderr


def test_slurm_profile_plans_the_same_study(tmp_path: Path) -> None:
    pytest.importorskip("snakemake_executor_plugin_slurm", reason="it reads the profile's keys")
    study, profile = STUDIES / "qwen3.yaml", ROOT / "profiles" / "slurm"
    done = snakemake("-n", "--workflow-profile", profile, "--configfile", study, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"Training {load_study(study).runs[0].id}" in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["run", "report", "record"])
def test_make_refuses_an_unknown_study(command: str) -> None:
    # -o: the environment is up to date, only the study is looked at
    done = run(["make", "-o", ".venv/.installed-base", command, "STUDY=none"])
    assert done.returncode != 0
    assert (
        "error: STUDY=none: not a file, nor the name of one in experiments/studies: " in done.stderr
    )
    assert "qwen3.yaml" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("named", [(), ("RECORD=default",), ("RECORD=default", "STUDY=default")])
def test_make_record_wants_its_study_by_name(named: tuple[str, ...]) -> None:
    done = run(["make", "-o", ".venv/.installed-base", "BIN=none", "record", *named])
    line = (
        "error: make record: replaces a record, so name its study, as in make record STUDY=default"
    )
    assert done.returncode == 2 and done.stderr.splitlines()[0] == line


@pytest.mark.parametrize("study", ["qwen3_smoke", "qwen3-smoke"])
def test_make_takes_a_study_by_the_name_of_its_file_or_its_own(study: str) -> None:
    shown = run(["make", "-pn", "-o", ".venv/.installed-base", "record", f"STUDY={study}"])
    assert "STUDY_FILE := experiments/studies/qwen3_smoke.yaml" in shown.stdout


@pytest.mark.parametrize(
    ("line", "is_needed"),
    [
        ("trainer: verl", True),
        ('trainer:  "verl"', True),
        ("'rollout' : vllm  # CPU", True),
        ("trainer: local  # local, or trainer: verl", False),
        ("rollout: eager", False),
    ],
)
def test_make_run_installs_the_engines_that_a_study_names(
    tmp_path: Path, line: str, is_needed: bool
) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(f"study: x\n{line}\n")
    done = run(["make", "--dry-run", "--always-make", "run", f"STUDY={study}"])
    assert done.returncode == 0, done.stderr
    assert ("requirements/engines.txt" in done.stdout) == is_needed


@pytest.mark.parametrize("name", ["x", '"x"  # quoted'])
def test_make_run_shows_the_claims_when_nothing_had_to_be_done(tmp_path: Path, name: str) -> None:
    text = SMOKE.read_text()
    (tmp_path / "study.yaml").write_text(text.replace("study: smoke\n", f"study: {name}\n"))
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    (tmp_path / "Snakefile").write_text('rule all:\n    input: "results/studies/x/claims.json"\n')
    judged = tmp_path / "results" / "studies" / "x" / "claims.json"
    judged.parent.mkdir(parents=True)
    shutil.copy(ROOT / "experiments" / "records" / "default-long" / "claims.json", judged)
    options = ("-f", ROOT / "Makefile", "-o", ".venv/.installed-base", "BIN=.", "STUDY=study.yaml")
    done = run(["make", *options, "run"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "noise floor" in done.stdout


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
    assert {"experiments.base", "experiments.launch.run", "experiments.evaluate.run"} <= modules
    assert {"analysis.claims", "analysis.figures", "experiments.tracking"} <= modules
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
    assert f"python -m analysis.run {study}\n" in log.read_text()
    require_nothing_executed(tmp_path)


def test_braces_in_the_name_of_a_study_file_are_refused(tmp_path: Path) -> None:
    study = shutil.copy(SMOKE, tmp_path / "{model}.yaml")
    done = snakemake("-n", "--configfile", study, folder=tmp_path)
    assert f"error: --configfile: {study}: Snakemake reads braces as wildcards" in done.stderr
    assert "Traceback" not in done.stderr
