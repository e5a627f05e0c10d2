"""Checkpoints of a run: from which of verl's it resumes, and which of all are evaluated."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from experiments.evaluate.checkpoints import find_checkpoints, model_folder
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES
from experiments.verl.checkpoints import TRACKER, rewind
from qat_core.checkpoint.manifest import write_manifest

RANKS = 2


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Whole checkpoints of steps 5, 10 and 15."""
    for step in (5, 10, 15):
        actor = tmp_path / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True)
        for rank in range(RANKS):
            (actor / f"model_world_size_{RANKS}_rank_{rank}.pt").touch()
    (tmp_path / TRACKER).write_text("15")
    return tmp_path


def left(checkpoints: Path) -> tuple[list[int], int | None]:
    """Steps of the checkpoints, and the one that verl resumes from."""
    steps = [int(path.name.rpartition("_")[2]) for path in checkpoints.glob("global_step_*")]
    tracker = checkpoints / TRACKER
    return sorted(steps), int(tracker.read_text()) if tracker.exists() else None


def lose_a_shard(checkpoints: Path) -> None:
    (checkpoints / "global_step_15" / "actor" / "model_world_size_2_rank_1.pt").unlink()


def save_the_first(checkpoints: Path) -> None:
    for later in (10, 15):
        shutil.rmtree(checkpoints / f"global_step_{later}")
    (checkpoints / TRACKER).write_text("5")


@pytest.mark.parametrize(
    ("change", "last_recorded", "steps", "latest"),
    [
        (lambda _: None, 20, [5, 10, 15], 15),
        (lambda _: None, 15, [5, 10, 15], 15),
        (lambda _: None, 14, [5, 10], 10),
        (lose_a_shard, 20, [5, 10], 10),
        (lambda it: (it / TRACKER).write_text("10"), 20, [5, 10], 10),
        (lambda it: (it / TRACKER).unlink(), 0, [], None),
        (save_the_first, 4, [], None),
    ],
    ids=[
        *("ahead", "equal", "its metrics lost", "a shard lost", "unfinished save"),
        *("incomplete all", "the first is saved and not logged"),
    ],
)
def test_goes_on_from_the_last_whole_step_with_metrics(
    checkpoints: Path,
    change: Callable[[Path], object],
    last_recorded: int,
    steps: list[int],
    latest: int | None,
) -> None:
    change(checkpoints)
    assert rewind(checkpoints, last_recorded) == (latest or 0)
    assert left(checkpoints) == (steps, latest)


@pytest.mark.parametrize(
    ("last_recorded", "what"),
    [(0, "no step of the run is recorded"), (4, "the last recorded step is 4")],
)
def test_complete_checkpoints_are_not_deleted_where_their_steps_are_not_recorded(
    checkpoints: Path, last_recorded: int, what: str
) -> None:
    with pytest.raises(ValueError) as refused:
        rewind(checkpoints, last_recorded)
    assert str(refused.value) == (
        f"{checkpoints / TRACKER}: step 15 was saved, but {what}; restore "
        f"metrics.jsonl of the run's attempts, or delete {checkpoints} to train from the first step"
    )
    assert left(checkpoints) == ([5, 10, 15], 15)


def test_run_without_checkpoints_starts_from_nothing(tmp_path: Path) -> None:
    rewind(tmp_path / "checkpoints", 3)
    assert list(tmp_path.iterdir()) == []


def test_renamed_folders_do_not_count(checkpoints: Path) -> None:
    (checkpoints / "global_step_10").rename(checkpoints / "global_step_10.bak")
    rewind(checkpoints, 14)
    assert (checkpoints / TRACKER).read_text() == "5"
    assert (checkpoints / "global_step_10.bak").exists()


@pytest.mark.parametrize("content", [b"", b"x", b"-1", b"1.5", b"\xff\xfe"])
def test_a_damaged_tracker_is_named(checkpoints: Path, content: bytes) -> None:
    (checkpoints / TRACKER).write_bytes(content)
    with pytest.raises(ValueError) as refused:
        rewind(checkpoints, 15)
    assert str(refused.value).startswith(f"{checkpoints / TRACKER}: ")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.long
def test_local_checkpoints_are_used_as_they_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for name in ("step_10", "step_5", "step_20.bak", "partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        write_manifest(tmp_path / name)
    found = find_checkpoints(tmp_path)
    assert list(found.items()) == [(5, tmp_path / "step_5"), (10, tmp_path / "step_10")]
    with model_folder(found[10]) as folder:
        assert folder == tmp_path / "step_10"


@pytest.mark.long
def test_a_damaged_local_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / "config.json").write_text("{}")
    write_manifest(tmp_path / "step_2")
    (tmp_path / "step_2" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"step_2/config.json: SHA-256 differs.*; restore it, or"):
        find_checkpoints(tmp_path)


@pytest.mark.long
def test_verl_checkpoints_count_once_complete_and_until_removed(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
    (tmp_path / TRACKER).write_text("10")  # killed while it saved step 15
    assert list(find_checkpoints(tmp_path)) == [5, 10]
    (tmp_path / "global_step_5" / "actor").rmdir()  # max_actor_ckpt_to_keep
    assert list(find_checkpoints(tmp_path)) == [10]


@pytest.mark.long
def test_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint; train the run"):
        find_checkpoints(tmp_path / "checkpoints")


@pytest.mark.long
def test_shards_that_do_not_merge_are_named(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="needs verl")
    actor = tmp_path / "global_step_5" / "actor"
    actor.mkdir(parents=True)
    with (
        pytest.raises(ValueError, match=r"global_step_5/actor: shards not merged: .*Error: "),
        model_folder(actor.parent),
    ):
        pass
    assert list(tmp_path.iterdir()) == [actor.parent]


MERGER = """
import os, sys, time
from pathlib import Path
Path(sys.argv[-1], "pid").write_text(str(os.getpid()))
time.sleep(600)
"""
EVALUATE = """
from experiments.evaluate import run
from experiments.support.cli import run_cli
run.check_base = run._held_out_questions = lambda *_: []
run_cli(run.main)
"""
LIMIT_S = 60


@pytest.mark.long
@pytest.mark.parametrize(("how", "left"), [(signal.SIGTERM, 0), (signal.SIGKILL, 1)])
def test_a_stopped_evaluation_leaves_no_process_and_what_a_killed_one_leaves_is_removed(
    tmp_path: Path, how: signal.Signals, left: int
) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").touch()
    (tmp_path / "verl" / "model_merger.py").write_text(MERGER)
    run = load_study(STUDIES / "default_long.yaml").runs[0].id
    checkpoints = tmp_path / run / "checkpoints"
    (checkpoints / "global_step_5" / "actor").mkdir(parents=True)
    (checkpoints / TRACKER).write_text("5")
    (checkpoints / ".merged_by_a_killed_one").mkdir()
    study = ["--study", str(STUDIES / "default_long.yaml"), "--run", run]
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
    command = [sys.executable, "-c", EVALUATE, *study, "--results", str(tmp_path)]
    evaluation = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths})
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (found := [p for p in checkpoints.glob(".merged_*/pid") if p.read_text()]):
            assert evaluation.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        merger = psutil.Process(int(found[0].read_text()))
        assert not (checkpoints / ".merged_by_a_killed_one").exists()
        evaluation.send_signal(how)
        assert evaluation.wait(LIMIT_S) == (130 if how == signal.SIGTERM else -how)
        merger.wait(LIMIT_S)
        assert len(list(checkpoints.glob(".merged_*"))) == left
    finally:
        evaluation.kill()
