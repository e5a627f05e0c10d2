"""Locks on the GPUs of this machine: Snakemake counts GPUs but does not assign them.

A GPU's lock is a file lock, which the kernel releases when the process ends, however it ends.
"""

import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path

from filelock import FileLock, Timeout

RETRY_S = 2.0
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = ("", "-1", "NoDevFiles")  # CUDA ignores what follows one; the last is Slurm's
GPU_LINE = re.compile(r"^GPU (\d+): .*\(UUID: (\S+)\)$", re.MULTILINE)


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES takes them."""
    if VISIBLE in os.environ:
        names = map(str.strip, os.environ[VISIBLE].split(","))
        return list(takewhile(lambda name: name not in NO_GPU, names))
    return list(_uuids())


def _uuids() -> dict[str, str]:
    """UUID by index of the machine's GPUs; empty without nvidia-smi."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return {}
    return dict(GPU_LINE.findall(listed.stdout))


def require_gpus(num_gpus: int) -> None:
    """Refuses a run that this machine can never serve.

    Raises:
        ValueError: there are fewer GPUs than that.
    """
    found = len(visible_gpus())
    if found < num_gpus:
        raise ValueError(
            f"device: cuda: the run takes {num_gpus} GPUs and this machine shows {found}; set "
            "gpus, CUDA_VISIBLE_DEVICES or device: cpu"
        )


@contextmanager
def locked_gpus(num_gpus: int, folder: Path | None = None) -> Iterator[list[str]]:
    """Waits for so many free GPUs and keeps them for the block.

    Args:
        num_gpus: how many.
        folder: of the lock files, named by UUID, since an index and a UUID may be one GPU; by
            default a folder of this user, machine and Slurm job.

    Raises:
        ValueError: this machine has fewer.
    """
    require_gpus(num_gpus)
    folder = folder or _own_folder()
    folder.mkdir(exist_ok=True)
    uuids = _uuids()
    locks = {
        name: folder / f"{uuids.get(name, name).replace('/', '-')}.lock" for name in visible_gpus()
    }
    with ExitStack() as stack:
        while len(taken := _take_free(num_gpus, locks, stack)) < num_gpus:
            stack.close()  # whoever needs fewer may have them meanwhile
            print(f"waiting for {num_gpus} free GPUs ({len(taken)} now)", flush=True)
            time.sleep(RETRY_S)
        yield taken


@contextmanager
def reserved_devices(device: str, num_gpus: int) -> Iterator[None]:
    """Locks GPUs and hides all others; before this process has used any. Nothing on a CPU.

    Raises:
        ValueError: this machine has fewer.
    """
    if device == "cpu":
        yield
        return
    with locked_gpus(num_gpus) as names:
        os.environ[VISIBLE] = ",".join(names)
        yield


def _own_folder() -> Path:
    """Slurm shows each job GPUs of its own under the same names, 0 and on."""
    owner = (str(os.getuid()), platform.node(), os.environ.get("SLURM_JOB_ID"))
    return Path(tempfile.gettempdir()) / "-".join(["gpu-locks", *filter(None, owner)])


def _take_free(num_gpus: int, locks: dict[str, Path], stack: ExitStack) -> list[str]:
    taken: list[str] = []
    for name, lock in locks.items():
        if len(taken) == num_gpus:
            break
        try:
            stack.enter_context(FileLock(lock, timeout=0))
        except Timeout:
            continue
        taken.append(name)
    return taken
