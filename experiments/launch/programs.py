"""Programs next to each other, all of which Ctrl-C ends."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import TextIO

from experiments.support.cli import INTERRUPTED
from experiments.support.signals import end_with_parent


class Programs:
    """Begun by several threads, interrupted by one.

    Each has a session of its own, so that a terminal's Ctrl-C is for this process alone. Were it
    for all, one that it ends could make room for another, which would begin after it.

    Attributes:
        are_stopped: nothing begins any more.
    """

    def __init__(self) -> None:
        self.are_stopped = False
        self._lock = Lock()
        self._running: set[subprocess.Popen[bytes]] = set()

    def exit_code(self, command: Sequence[str], output: TextIO) -> int:
        """Of a program that is begun and waited for; it ends with this process."""
        with self._lock:
            if self.are_stopped:
                return INTERRUPTED
            program = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
            self._running.add(program)
        code = program.wait()
        with self._lock:
            self._running.remove(program)
        return code

    def stop(self) -> None:
        """Interrupts what runs."""
        with self._lock:
            self.are_stopped = True
            for program in self._running:
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGINT)
