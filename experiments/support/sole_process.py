"""One process at a time for a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def sole_process(lock: Path, folder: Path, does: str) -> Iterator[None]:
    """Holds a lock file for the block; the kernel releases the lock of a killed process.

    Args:
        lock: the lock file; its folder is made if there is none.
        folder: what the lock is for.
        does: what the other process does with the folder, for the error.

    Raises:
        ValueError: another process has the lock.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(lock).acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{folder}: another process {does} it; wait for it or end it") from None
    with held:
        yield
