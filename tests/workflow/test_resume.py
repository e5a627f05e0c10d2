"""A run that is stopped, by whatever means, resumes and ends as if it had not been stopped."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from mlflow import MlflowClient

from experiments.launch.run import KILLED
from experiments.rl.metric_names import DRIFT_FILE
from experiments.runs.attempts import list_attempts
from experiments.runs.manifest import read_manifest
from experiments.study.schema import ROOT
from experiments.support.json_files import read_json, write_json
from experiments.tracking.store import find_runs
from tests.files import contents
from tests.study_files import write_study
from tests.workflow.programs import ENVIRONMENT, SMOKE, module, snakemake

RUN = "tiny_nvfp4-qat_seed0"
STEPS = 30  # about three seconds of training: time enough to be killed in
TIMINGS = ("timing_s/", "perf/")
START_LIMIT_S = 600  # of seconds at most on a machine that does nothing else


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the base checkpoint and an MLflow store, and a longer smoke study."""
    folder = tmp_path_factory.mktemp("base")
    text = SMOKE.read_text()
    assert text.count("steps: 6\n") == 1
    (folder / "study.yaml").write_text(text.replace("steps: 6\n", f"steps: {STEPS}\n"))
    out = ("--model", "tiny", "--out", "results/base/tiny")
    done = module("experiments.base make", "--study", "study.yaml", *out, folder=folder)
    assert done.returncode == 0, done.stderr
    MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder


@pytest.fixture(scope="module")
def uninterrupted(base: Path) -> list[dict[str, Any]]:
    """The metrics of the run when nobody stops it."""
    done = launch(base, results="uninterrupted")
    assert done.wait() == 0
    return read_rows(base / "uninterrupted" / RUN / "metrics.jsonl")


def launch(base: Path, results: str, *runs: str) -> subprocess.Popen[bytes]:
    """The program that trains RUN, or several runs."""
    folder = base / results
    if not folder.exists():
        folder.mkdir()
        (folder / "base").symlink_to(base / "results" / "base")
    names = runs or (RUN,)
    command = [sys.executable, "-m", "experiments.launch.run", "--study", "study.yaml"]
    command += ["--run", *names, "--results", results]
    command += ["--log", *(f"{results}/{name}.log" for name in names)]
    return subprocess.Popen(command, cwd=base, env=ENVIRONMENT, stdout=subprocess.DEVNULL)


def read_rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def stop_after(process: subprocess.Popen[bytes], file: Path, steps: int, how: int) -> None:
    """Sends a signal once so many steps are on disk."""
    wait_for_steps(process, file, steps)
    process.send_signal(how)


def wait_for_steps(process: subprocess.Popen[bytes], file: Path, steps: int) -> None:
    """Returns once so many steps are on disk."""
    deadline = time.monotonic() + START_LIMIT_S
    while len(read_rows(file)) < steps:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


def mlflow_run(base: Path) -> Any:
    """The newest MLflow run of RUN, with the steps at which its KL was logged."""
    client = MlflowClient(f"sqlite:///{base}/mlflow.db")
    experiment = client.get_experiment_by_name("smoke")
    (run_id,) = find_runs(client, experiment.experiment_id, RUN)
    history = client.get_metric_history(run_id, "rollout_corr/k3_kl")
    return client.get_run(run_id), {point.step for point in history}


@pytest.mark.parametrize(
    ("how", "exit_code", "reason"),
    [
        (signal.SIGKILL, -signal.SIGKILL, KILLED),
        pytest.param(signal.SIGTERM, 130, "KeyboardInterrupt: SIGTERM", marks=pytest.mark.long),
    ],
    ids=["killed", "terminated"],
)
def test_stopped_run_goes_on_and_ends_as_if_it_had_not_been(
    base: Path, uninterrupted: list[dict[str, Any]], how: int, exit_code: int, reason: str
) -> None:
    results = f"stopped-{how}"
    run_dir = base / results / RUN
    process = launch(base, results)
    stop_after(process, run_dir / "attempts" / "1" / "metrics.jsonl", steps=7, how=how)
    assert process.wait() == exit_code
    assert not (run_dir / "metrics.jsonl").exists() and not (run_dir / "manifest.json").exists()
    if how == signal.SIGTERM:
        assert mlflow_run(base)[0].info.status == "FAILED"

    assert launch(base, results).wait() == 0
    first, second = list_attempts(run_dir)
    assert first.manifest.status == "failed" and first.manifest.reason == reason
    assert second.manifest.status == "finished"
    assert second.rows()[0]["step"] > 1  # it went on, it did not start over
    run, steps = mlflow_run(base)
    assert run.info.status == "FINISHED" and run.data.tags["attempt"] == "2"
    assert steps == set(range(1, STEPS + 1))

    rows = read_rows(run_dir / "metrics.jsonl")
    untimed = [without_timings(row) for row in rows]
    assert untimed == [without_timings(row) for row in uninterrupted]
    for name in ("checkpoints", DRIFT_FILE):
        assert contents(run_dir / name) == contents(base / "uninterrupted" / RUN / name)


def test_runs_of_one_process_have_the_bits_of_runs_alone_also_after_a_kill(
    base: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    runs = ("tiny_bf16_seed0", RUN)
    folder = base / "grouped"
    process = launch(base, "grouped", *runs)
    stop_after(process, folder / RUN / "attempts" / "1" / "metrics.jsonl", 7, signal.SIGKILL)
    process.wait()
    with FileLock(folder / RUN / "lock", timeout=START_LIMIT_S):  # its fork ends with it
        assert len(list_attempts(folder / RUN)) == 1

    assert launch(base, "grouped", *runs).wait() == 0
    assert [len(list_attempts(folder / run)) for run in runs] == [1, 2]
    rows = read_rows(folder / RUN / "metrics.jsonl")
    assert list(map(without_timings, rows)) == list(map(without_timings, uninterrupted))
    assert contents(folder / RUN / "checkpoints") == contents(
        base / "uninterrupted" / RUN / "checkpoints"
    )
    assert RUN in (folder / f"{RUN}.log").read_text()


def without_timings(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(TIMINGS)}


@pytest.mark.long
def test_crash_after_the_last_step_loses_nothing(
    base: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    run_dir = base / "uninterrupted" / RUN
    (first,) = list_attempts(run_dir)
    finished = first.manifest
    # as if killed before it could report
    finished.model_copy(update={"status": "running"}).write(first.folder)
    for name in ("metrics.jsonl", "manifest.json"):
        (run_dir / name).unlink()
    assert launch(base, "uninterrupted").wait() == 0
    assert read_rows(run_dir / "metrics.jsonl") == uninterrupted
    again = json.loads((run_dir / "manifest.json").read_text())
    assert again["status"] == "finished" and again["attempt"] == 2
    before = finished.model_dump(mode="json")
    assert again["memory"] == before["memory"] and again["coverage"] == before["coverage"]


@pytest.mark.long
def test_a_run_is_trained_by_one_process_at_a_time(base: Path) -> None:
    run_dir = base / "twice" / RUN
    first = launch(base, "twice")
    wait_for_steps(first, run_dir / "attempts" / "1" / "metrics.jsonl", steps=1)
    arguments = ("--study", "study.yaml", "--run", RUN, "--results", "twice", "--log", "other.log")
    second = module("experiments.launch.run", *arguments, folder=base)
    assert first.wait() == 0  # it had not ended before the second began: that would be no error
    assert second.returncode == 2
    error = f"error: twice/{RUN}: another process trains it; wait for it or end it\n"
    assert second.stderr == error
    assert [attempt.number for attempt in list_attempts(run_dir)] == [1]


@pytest.mark.long
def test_run_that_finished_without_its_snakemake_is_not_trained_again(
    base: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    run_dir = base / "results" / RUN
    command = [f"results/{RUN}/manifest.json", "--configfile", base / "study.yaml"]
    program = [str(Path(sys.executable).parent / "snakemake"), "--directory", base, *command]
    process = subprocess.Popen(program, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    stop_after(process, run_dir / "attempts" / "1" / "metrics.jsonl", 1, how=signal.SIGKILL)
    process.wait()
    with FileLock(run_dir / "lock", timeout=START_LIMIT_S):  # until the launcher has ended
        (attempt,) = list_attempts(run_dir)
    assert attempt.manifest.status == "finished"

    assert snakemake(*command, "--unlock", folder=base).returncode == 0
    again = snakemake(*command, folder=base)
    assert again.returncode == 0, again.stderr
    assert f"{RUN} has finished; its results are rewritten" in again.stdout
    assert list_attempts(run_dir) == [attempt]
    assert read_manifest(run_dir, "") == attempt.manifest
    untimed = [without_timings(row) for row in read_rows(run_dir / "metrics.jsonl")]
    assert untimed == [without_timings(row) for row in uninterrupted]


@pytest.mark.long
def test_changed_study_starts_over(base: Path, uninterrupted: list[dict[str, Any]]) -> None:
    run_dir = base / "changed" / RUN
    process = launch(base, "changed")
    stop_after(process, run_dir / "attempts" / "1" / "metrics.jsonl", steps=7, how=signal.SIGKILL)
    process.wait()
    study = base / "study.yaml"
    text = study.read_text()
    study.write_text(text.replace("lr: 1.0e-4", "lr: 2.0e-4"))
    try:
        assert launch(base, "changed").wait() == 0
    finally:
        study.write_text(text)
    rows = read_rows(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["actor/lr"] == 2.0e-4
    assert list_attempts(run_dir)[1].rows()[0]["step"] == 1

    assert launch(base, "changed").wait() == 0  # a finished run too, when the study is changed back
    assert read_rows(run_dir / "metrics.jsonl")[0]["actor/lr"] == 1.0e-4
    assert list_attempts(run_dir)[2].rows()[0]["step"] == 1


@pytest.mark.long
def test_failed_run_leaves_no_result(base: Path, tmp_path: Path) -> None:
    study = write_study(tmp_path, {"rl/rollout/max_prompt_tokens": 1}, SMOKE)
    arguments = ("--run", RUN, "--results", "failed", "--log", "failed/last.log")
    shutil.copytree(base / "results" / "base", base / "failed" / "base")
    for path in (base / "failed" / "base").glob("*/manifest.json"):
        manifest = read_json(path)
        del manifest["longest_prompt_tokens"]  # as in older ones: training is what refuses then
        write_json(path, manifest)
    done = module("experiments.launch.run", "--study", study, *arguments, folder=base)
    assert done.returncode == 2
    (error,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: rl.rollout.max_prompt_tokens: 1 is less than the ")
    assert "Traceback" not in done.stdout + done.stderr
    assert {path.name for path in (base / "failed" / RUN).iterdir()} == {"attempts", "lock"}
    assert mlflow_run(base)[0].info.status == "FAILED"
