"""What a run holds outside its own folder, and what is removed when it has ended.

It is written down too: after a launcher was killed, the run's next attempt removes it.
"""

import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

LEFTOVERS_FILE = "leftovers.txt"
SHARED_MEMORY = Path("/dev/shm")
# names given by Python's multiprocessing, which vLLM uses, and by verl's weight transfer
SEGMENTS = re.compile(rf"{SHARED_MEMORY}/(?:psm_|verl_weights_)\S+")
# of Ray's sockets, some 80 bytes below it, whose paths may have 107
PARENT_FOLDER = Path("/tmp")
PREFIX = "verl-"
OURS = re.compile(
    rf"{SEGMENTS.pattern}|{SHARED_MEMORY}/sem\.loky-\d+-\*|{PARENT_FOLDER}/{PREFIX}\w+"
)


class Leftovers:
    """Files and folders to remove at the end, also noted in a file."""

    def __init__(self, record: Path) -> None:
        self.record = record
        self._noted: set[str] = set()

    def note(self, path: Path | str) -> None:
        """Writes down a path, or a pattern of paths, once."""
        if str(path) not in self._noted:
            self._noted.add(str(path))
            with self.record.open("a") as file:
                file.write(f"{path}\n")

    def note_shared_memory(self, processes: Iterable[psutil.Process]) -> None:
        """Notes what the processes map: other runs of this machine have shared memory too."""
        for process in processes:
            self.note(SHARED_MEMORY / f"sem.loky-{process.pid}-*")  # joblib's, in vLLM's workers
            with suppress(OSError):
                for segment in SEGMENTS.findall(Path(f"/proc/{process.pid}/maps").read_text()):
                    self.note(segment)

    def remove(self) -> None:
        """Removes all that was noted, and the record."""
        remove_leftovers(self.record)


def remove_leftovers(record: Path) -> None:
    """Removes what a record names, where it is still there, and the record."""
    if not record.exists():
        return
    for line in record.read_bytes().splitlines():
        pattern = Path(os.fsdecode(line))
        # a damaged line may name any folder
        if not OURS.fullmatch(str(pattern)):
            continue
        for path in pattern.parent.glob(pattern.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    record.unlink()
