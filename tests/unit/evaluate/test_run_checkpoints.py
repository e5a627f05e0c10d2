"""Which checkpoints of a run are complete, and how a damaged one is named."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from experiments.evaluate.checkpoints import find_checkpoints, model_folder
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES
from experiments.verl.checkpoints import TRACKER
from qat_core.checkpoint.manifest import write_manifest

pytestmark = pytest.mark.long


def test_local_checkpoints_are_used_as_they_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for name in ("step_10", "step_5", "step_20.bak", "partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        write_manifest(tmp_path / name)
    found = find_checkpoints(tmp_path)
    assert list(found.items()) == [(5, tmp_path / "step_5"), (10, tmp_path / "step_10")]
    with model_folder(found[10]) as folder:
        assert folder == tmp_path / "step_10"


def test_a_damaged_local_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / "config.json").write_text("{}")
    write_manifest(tmp_path / "step_2")
    (tmp_path / "step_2" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"step_2/config.json: SHA-256 differs.*; restore it, or"):
        find_checkpoints(tmp_path)


def test_verl_checkpoints_count_once_complete_and_until_removed(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
    (tmp_path / TRACKER).write_text("10")  # killed while it saved step 15
    assert list(find_checkpoints(tmp_path)) == [5, 10]
    (tmp_path / "global_step_5" / "actor").rmdir()  # max_actor_ckpt_to_keep
    assert list(find_checkpoints(tmp_path)) == [10]


def test_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint; train the run"):
        find_checkpoints(tmp_path / "checkpoints")


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
    study = [
        "--study",
        str(STUDIES / "default_long.yaml"),
        "--run",
        run,
        "--results",
        str(tmp_path),
    ]
    paths = os.pathsep.join(map(str, (tmp_path, ROOT)))
    evaluation = subprocess.Popen(
        [sys.executable, "-c", EVALUATE, *study], env=os.environ | {"PYTHONPATH": paths}
    )
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
