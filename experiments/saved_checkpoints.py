"""The checkpoints that a run has saved, each as a folder that transformers can load."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

# verl writes a step's number here once its checkpoint is complete
VERL_LATEST = "latest_checkpointed_iteration.txt"


def find_checkpoints(folder: Path) -> dict[int, Path]:
    """Complete checkpoints of either trainer by step, ascending.

    Raises:
        FileNotFoundError: there is none.
    """
    paths = _verl_checkpoints(folder) if (folder / VERL_LATEST).exists() else folder.glob("step_*")
    found = {int(path.name.rpartition("_")[2]): path for path in paths}
    if not found:
        raise FileNotFoundError(f"{folder}: no checkpoint; run the training rule first")
    return dict(sorted(found.items()))


def _verl_checkpoints(folder: Path) -> Iterator[Path]:
    """Of older checkpoints verl removes the weights and leaves the rest."""
    latest = int((folder / VERL_LATEST).read_text())
    for path in folder.glob("global_step_*"):
        if int(path.name.rpartition("_")[2]) <= latest and (path / "actor").is_dir():
            yield path


@contextmanager
def model_folder(checkpoint: Path) -> Iterator[Path]:
    """A checkpoint in the hub's form; verl's shards are merged into a folder that is then removed.

    Raises:
        ValueError: verl's merger fails; names the checkpoint and tells why.
    """
    sharded = checkpoint / "actor"
    if not sharded.is_dir():
        yield checkpoint
        return
    with TemporaryDirectory(prefix=".merged_", dir=checkpoint.parent) as merged:
        merge = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        places = ["--local_dir", str(sharded), "--target_dir", merged]
        done = subprocess.run([*merge, *places], capture_output=True, text=True)
        if done.returncode != 0:
            raise ValueError(
                f"{sharded}: shards not merged: {done.stderr.strip().splitlines()[-1]}"
            )
        yield Path(merged)
