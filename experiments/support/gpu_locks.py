"""Locks on the GPUs of this machine: Snakemake counts GPUs but does not assign them.

Each GiB of a GPU's memory has a file lock, which the kernel releases when the process ends, however
it ends. A process takes all of them, or as many as it needs where runs share a GPU.
"""

import os
import platform
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from math import ceil
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


def require_device(device: str) -> None:
    """ValueError if a GPU is asked for and there is none."""
    import torch  # neither help nor other mistakes wait for it

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: cuda: no CUDA GPU here; --device cpu only rehearses")


def require_gpus(num_gpus: int, memory_gib: float | None = None) -> None:
    """Refuses a run that this machine can never serve."""
    found = len(visible_gpus())
    if found < num_gpus:
        raise ValueError(
            f"device: cuda: the run takes {num_gpus} GPUs and this machine shows {found}; set "
            "gpus, CUDA_VISIBLE_DEVICES or device: cpu"
        )
    if memory_gib is None:
        return
    sizes_gib = map(len, _unit_locks(Path()).values())
    if sum(size >= memory_gib for size in sizes_gib) < num_gpus:
        raise ValueError(
            f"gpu_memory_gib: {memory_gib} is more than nvidia-smi says that a GPU has; lower it, "
            "or remove it to use whole GPUs"
        )


@contextmanager
def locked_gpus(
    num_gpus: int, folder: Path | None = None, memory_gib: float | None = None
) -> Iterator[list[str]]:
    """Waits, however long, for so many free GPUs or a share of each; keeps them for the block.

    Files in `folder`, by default one of this user, machine and Slurm job, are named by UUID, since
    an index and a UUID may be one GPU. With `memory_gib` each GPU is shared with others that say
    how much memory they take; without, with nobody.
    """
    require_gpus(num_gpus, memory_gib)
    folder = folder or _own_folder()
    folder.mkdir(exist_ok=True)
    locks = _unit_locks(folder)
    _allow_open_files(sum(map(len, locks.values())))
    needed = None if memory_gib is None else ceil(memory_gib)
    with ExitStack() as stack:
        while len(taken := _take_free(num_gpus, locks, needed, folder, stack)) < num_gpus:
            stack.close()  # a run that needs fewer may take them meanwhile
            what = "free GPUs" if needed is None else f"GPUs with {needed} GiB free"
            print(f"waiting for {num_gpus} {what} ({len(taken)} now)", flush=True)
            time.sleep(RETRY_S)
        yield taken


@contextmanager
def reserved_devices(device: str, num_gpus: int, memory_gib: float | None = None) -> Iterator[None]:
    """Locks GPUs and hides all others; before this process has used any. Nothing on a CPU."""
    if device == "cpu":
        yield
        return
    with locked_gpus(num_gpus, memory_gib=memory_gib) as names:
        os.environ[VISIBLE] = ",".join(names)
        yield


def shares_of_gpus(memory_gib: float) -> int:
    """How many runs that take so much memory each fit on the GPUs of this process."""
    return sum(len(units) // ceil(memory_gib) for units in _unit_locks(Path()).values())


def _unit_locks(folder: Path) -> dict[str, list[Path]]:
    """One lock file for each GiB of each visible GPU; one in all where its memory is unknown."""
    uuids, sizes = _uuids(), _memory_gib()
    ids = {name: uuids.get(name, name) for name in visible_gpus()}
    return {
        name: [folder / f"{uuid.replace('/', '-')}.{i}.lock" for i in range(sizes.get(uuid, 1))]
        for name, uuid in ids.items()
    }


def _memory_gib() -> dict[str, int]:
    """Whole GiB of memory by UUID, where nvidia-smi knows it: not of GPUs that use the CPU's."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return {}
    rows = (line.split(", ") for line in listed.splitlines() if line.startswith("GPU-"))
    return {uuid: int(mib) // 1024 for uuid, mib in rows if mib.isdecimal()}


def _allow_open_files(num_more: int) -> None:
    """Raises the limit if the system lets: eight GPUs of 141 GB have more than 1024 units."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + num_more, hard), hard))


def _own_folder() -> Path:
    """Slurm shows each job GPUs of its own under the same names, 0 and on."""
    owner = (str(os.getuid()), platform.node(), os.environ.get("SLURM_JOB_ID"))
    return Path(tempfile.gettempdir()) / "-".join(["gpu-locks", *filter(None, owner)])


def _take_free(
    num_gpus: int, locks: dict[str, list[Path]], needed: int | None, folder: Path, stack: ExitStack
) -> list[str]:
    """Locks `needed` units, None for all, of as many GPUs as are wanted; returns their names.

    The GPUs with the most free units come first, so that runs which share are spread evenly.
    """
    taken: list[str] = []
    # one at a time: two that each hold half of a GPU's units would both go without
    with FileLock(folder / "taking.lock"):
        for name, units in sorted(locks.items(), key=lambda gpu: -_count_free(gpu[1])):
            if len(taken) == num_gpus:
                break
            with ExitStack() as of_gpu:
                wanted = len(units) if needed is None else needed
                if _count_locked(units, wanted, of_gpu) == wanted:
                    stack.push(of_gpu.pop_all())
                    taken.append(name)
    return taken


def _count_free(units: list[Path]) -> int:
    with ExitStack() as stack:
        return _count_locked(units, len(units), stack)


def _count_locked(units: list[Path], wanted: int, stack: ExitStack) -> int:
    count = 0
    for unit in units:
        if count == wanted:
            break
        try:
            stack.enter_context(FileLock(unit, timeout=0))
        except Timeout:
            continue
        count += 1
    return count
