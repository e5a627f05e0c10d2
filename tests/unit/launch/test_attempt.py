"""What the launcher records and prints of a step, and which attempts it resumes."""

import json
import shutil
from pathlib import Path

import pytest

from experiments.launch import run as launcher
from experiments.launch.local_trainer import train_here
from experiments.launch.progress import Progress
from experiments.launch.run import KILLED, open_attempts, run_attempt
from experiments.rl.metric_names import DRIFT_FILE
from experiments.runs.attempts import STOP_FILE, list_attempts, next_attempt
from experiments.runs.manifest import RunManifest
from experiments.study.load import load_study
from experiments.study.protocol import judging_digest
from experiments.study.schema import ROOT, STUDIES
from experiments.tracking.live import TrackedRun
from experiments.tracking.run_log import RunLog, Tracker
from tests.records import make_manifest
from tests.workflow.programs import SMOKE

STUDY = load_study(SMOKE)
METRICS = {
    "rollout_corr/k3_kl": 1.234e-4,
    "critic/score/mean": 0.5,
    "perf/total_num_tokens": 24691.2,
    "timing_s/step": 2.0,
}


def make_log(tmp_path: Path) -> RunLog:
    tracked = TrackedRun("s", "run")
    tracked.failure = "no store in this test"
    return RunLog("run", 10, next_attempt(tmp_path), tracked)


def test_progress_line_shows_step_mismatch_reward_speed_and_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = make_log(tmp_path)
    log.on_step(7, METRICS)
    log.on_step(8, METRICS | {"timing_s/step": 4.0, "perf/total_num_tokens": 49382.4})
    last = capsys.readouterr().out.splitlines()[-1]
    line = "run step 8/10 k3 KL 1.23e-04 reward +0.500 12,346 tokens/s 0:00:06 left"
    assert " ".join(last.split()) == line


def test_metrics_that_are_not_finite_are_recorded_as_undefined(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.on_step(1, METRICS | {"rollout_corr/kl": float("nan"), "ppl": float("inf")})
    (line,) = (log.attempt.folder / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["rollout_corr/kl"] is None and row["ppl"] is None
    assert row["rollout_corr/k3_kl"] == METRICS["rollout_corr/k3_kl"]


def test_a_run_that_gets_no_gpu_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    study = load_study(STUDIES / "default_long.yaml").model_copy(update={"device": "cuda"})
    with pytest.raises(SystemExit) as ended:
        launcher.launch(study, study.runs[0], tmp_path, {}, tmp_path / "log", Tracker())
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("error: device: cuda: the run takes 1 GPUs")


@pytest.mark.parametrize(
    ("lost", "missing"), [({2}, 2), ({1, 2, 3}, 1), ({3, 4}, 3)], ids=["one", "first", "some"]
)
def test_lost_steps_are_noticed_before_a_run_is_resumed(
    tmp_path: Path, lost: set[int], missing: int
) -> None:
    digests = {"config": "a"}
    attempt = next_attempt(tmp_path)
    make_manifest(digests=digests).write(attempt.folder)
    for step in (step for step in range(1, 6) if step not in lost):
        attempt.append({"step": step})
    with pytest.raises(ValueError) as refused:
        open_attempts(tmp_path, digests)
    assert str(refused.value) == (
        f"{tmp_path}/attempts/*/metrics.jsonl: step {missing} is missing; restore it, or delete "
        "the run's folder to train the run again"
    )
    assert len(list_attempts(tmp_path)) == 1


class FailingTracker(Tracker):
    """One whose store is out of reach when a run starts."""

    def start(self, manifest: RunManifest, resumes: bool) -> None:
        raise RuntimeError("no store")


@pytest.mark.parametrize(
    ("digests", "numbers", "stays"),
    [({"config": "a"}, [1, 2], True), ({"config": "b"}, [2], False)],
    ids=["same experiment", "another configuration"],
)
def test_what_a_run_left_outlives_a_crash_but_not_a_change(
    tmp_path: Path,
    digests: dict[str, str],
    numbers: list[int],
    stays: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A change removes it when training begins, not while the run waits for a GPU.

    But for a stop file: one that is made while the run waits is meant for it.
    """
    run_dir = tmp_path / STUDY.runs[0].id
    (run_dir / "checkpoints" / "step_2").mkdir(parents=True)
    left = (DRIFT_FILE, "eval.json", "metrics.jsonl", "manifest.json")
    for name in (STOP_FILE, *left):
        (run_dir / name).touch()
    make_manifest(digests={"config": "a"}).write(next_attempt(run_dir).folder)
    attempts = open_attempts(run_dir, digests)
    assert [attempt.number for attempt in attempts] == numbers
    assert all((run_dir / name).exists() for name in ("checkpoints/step_2", *left))
    assert (run_dir / STOP_FILE).exists() == stays
    (killed,) = list_attempts(run_dir)
    assert killed.manifest.status == "failed" and killed.manifest.reason == KILLED
    (run_dir / STOP_FILE).touch()  # while it waits
    monkeypatch.setattr(launcher, "new_manifest", lambda *_: make_manifest(status="running"))
    with pytest.raises(RuntimeError, match="no store"):
        run_attempt(STUDY, STUDY.runs[0], tmp_path, digests, attempts, FailingTracker())
    assert (run_dir / STOP_FILE).exists()
    for name in ("checkpoints/step_2", *left):
        assert (run_dir / name).exists() == stays, name


def test_an_attempt_says_that_its_tracker_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = next_attempt(tmp_path / STUDY.runs[0].id)
    manifest = make_manifest(status="running")
    monkeypatch.setattr(launcher, "new_manifest", lambda *_: manifest)
    with pytest.raises(RuntimeError, match="no store"):
        run_attempt(STUDY, STUDY.runs[0], tmp_path, {}, [attempt], FailingTracker())
    ended = attempt.manifest
    assert (ended.status, ended.reason) == ("failed", "RuntimeError: no store")


def test_a_resumed_run_keeps_the_way_of_judging_that_it_started_under(tmp_path: Path) -> None:
    run, base = STUDY.runs[0], tmp_path / "base"
    base.mkdir()
    shutil.copy(ROOT / "tests" / "workflow" / "tiny.json", base / "config.json")
    attempts = [next_attempt(tmp_path / run.id)]
    launcher.new_manifest(STUDY, run, base, {}, attempts).write(attempts[0].folder)
    later = STUDY.model_copy(update={"seeds": (0, 1)})
    attempts.append(next_attempt(tmp_path / run.id))
    resumed = launcher.new_manifest(later, run, base, {}, attempts)
    assert resumed.judging_sha256 == judging_digest(STUDY) != judging_digest(later)


def test_a_checkpoint_beyond_the_recorded_steps_is_not_resumed(tmp_path: Path) -> None:
    run = STUDY.runs[0]
    (tmp_path / run.id / "checkpoints" / "step_4").mkdir(parents=True)
    attempts = [next_attempt(tmp_path / run.id) for _ in range(2)]
    for step in (1, 2):
        attempts[0].append({"step": step})
    with pytest.raises(ValueError, match=r"attempts/\*/metrics.jsonl: step 3 is missing; restore"):
        train_here(STUDY, run, tmp_path, attempts, lambda step, metrics: None)


def test_runs_count_as_in_work_from_their_first_step_and_as_done_once_evaluated(
    tmp_path: Path,
) -> None:
    progress = Progress(STUDY, tmp_path)
    assert progress.line().startswith("0 of 2 runs done, 0 in work")
    run_dir = tmp_path / STUDY.runs[0].id
    attempt = run_dir / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt / "metrics.jsonl").write_text("{}\n")
    assert progress.line().startswith("0 of 2 runs done, 1 in work")
    assert progress.line().endswith(" left")
    (run_dir / "manifest.json").touch()
    assert progress.line().startswith("0 of 2 runs done, 1 in work")
    (run_dir / "eval.json").touch()
    assert progress.line().startswith("1 of 2 runs done, 0 in work")
    assert "2 runs, 1 to go" in Progress(STUDY, tmp_path).beforehand()
