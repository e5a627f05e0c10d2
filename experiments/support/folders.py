"""Folders that belong to one process at a time, or that a program replaces as a whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def sole_process(lock: Path, folder: Path, does: str) -> Iterator[None]:
    """Holds a lock file for the block; the kernel releases the lock of a killed process."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(lock).acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{folder}: another process {does} it; wait for it or end it") from None
    with held:
        yield


def require_replaceable(out: Path) -> None:
    """Refuses what no base and no data are, such as results or a run, and would be deleted.

    No file can be asked for instead: Snakemake makes the folder, and removes the manifest of one
    that is made again.
    """
    if out.is_file() or (out.is_dir() and any(path.is_dir() for path in out.iterdir())):
        raise ValueError(
            f"--out: {out}: would be deleted, and is a file or holds folders, as nothing that this "
            "program makes; name another folder"
        )
