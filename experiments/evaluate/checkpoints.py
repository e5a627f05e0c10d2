"""The checkpoints that a run has saved, each as a folder that transformers can load."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.rl.resume import check, find_steps
from experiments.support.signals import end_with_parent
from experiments.verl.checkpoints import TRACKER, steps_on_disk, tracked_step

MERGED = ".merged_"


def find_checkpoints(folder: Path) -> dict[int, Path]:
    """Complete checkpoints of either trainer by step, ascending."""
    is_of_verl = (folder / TRACKER).exists()
    found = _verl_checkpoints(folder) if is_of_verl else _local_checkpoints(folder)
    if not found:
        raise FileNotFoundError(
            f"{folder}: no checkpoint; train the run as far as rl.save_every, and evaluate it then"
        )
    return dict(sorted(found.items()))


def _local_checkpoints(folder: Path) -> dict[int, Path]:
    steps = find_steps(folder)
    for path in steps.values():
        try:
            check(path)
        except ValueError as error:
            hint = f"restore it, or delete {folder.parent} and run the study again"
            raise ValueError(f"{error}; {hint}") from None
    return steps


def _verl_checkpoints(folder: Path) -> dict[int, Path]:
    """Of older checkpoints verl removes the weights and leaves the rest."""
    latest, steps = tracked_step(folder), steps_on_disk(folder)
    return {
        step: path for step, path in steps.items() if step <= latest and (path / "actor").is_dir()
    }


def remove_merged(folder: Path) -> None:
    """Removes what `model_folder` left among a run's checkpoints when it was killed."""
    for left in folder.glob(f"{MERGED}*"):
        shutil.rmtree(left)


@contextmanager
def model_folder(checkpoint: Path) -> Iterator[Path]:
    """A checkpoint in the hub's form; verl's shards are merged into a folder that is removed."""
    sharded = checkpoint / "actor"
    if not sharded.is_dir():
        yield checkpoint
        return
    with TemporaryDirectory(prefix=MERGED, dir=checkpoint.parent) as merged:
        merge = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        places = ["--local_dir", str(sharded), "--target_dir", merged]
        done = subprocess.run(
            [*merge, *places], capture_output=True, text=True, preexec_fn=end_with_parent
        )
        if done.returncode != 0:
            *_, reason = ["", *done.stderr.strip().splitlines()]
            raise ValueError(
                f"{sharded}: shards not merged: exit code {done.returncode}, {reason}; "
                "train the run again"
            )
        yield Path(merged)
