"""verl as a child process: all that it starts ends with it, and leaves no shared memory behind."""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from experiments.support.signals import deferred_signals, end_with_parent
from experiments.verl.command import Command
from experiments.verl.leftovers import LEFTOVERS_FILE, PARENT_FOLDER, PREFIX, Leftovers

SET_CHILD_SUBREAPER = 36  # prctl(2)
_LIBC = ctypes.CDLL(None)

GRACE_S = 15.0
KILL_S = 15.0
POLL_S = 0.2


class VerlProcess:
    """A running verl with everything that it started."""

    def __init__(self, command: Command, log: Path) -> None:
        self._bystanders = set(psutil.Process().children(recursive=True))
        self._leftovers = Leftovers(log.with_name(LEFTOVERS_FILE))
        temporary = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PARENT_FOLDER))
        self._leftovers.note(temporary)
        # orphans of verl become children of this process, so that they can be found
        _LIBC.prctl(SET_CHILD_SUBREAPER, 1)
        with log.open("wb") as file:
            self._child = subprocess.Popen(
                [sys.executable, *command.arguments[1:]],
                env=_environment(command, temporary),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def exit_code(self) -> int | None:
        """verl's exit code, or None while it runs."""
        self._leftovers.note_shared_memory(self._descendants())
        return self._child.poll()

    def end(self) -> None:
        """Ends verl and whatever it started, and removes what they leave."""
        self._leftovers.note_shared_memory(self._descendants())
        if self._child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGTERM)
        if not self._ended_within(GRACE_S):
            for process in self._descendants():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            assert self._ended_within(KILL_S), f"{self._descendants()} outlive SIGKILL"
        self._leftovers.remove()
        _LIBC.prctl(SET_CHILD_SUBREAPER, 0)

    def _ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._child.poll() is None or self._descendants():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _descendants(self) -> list[psutil.Process]:
        """All that verl started and that still runs; reaps adopted children that have exited."""
        alive = []
        for process in psutil.Process().children(recursive=True):
            if process in self._bystanders or process.pid == self._child.pid:
                continue
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
                elif process.ppid() == os.getpid():
                    os.waitpid(process.pid, 0)
        return alive


@contextmanager
def running_verl(command: Command, log: Path) -> Iterator[VerlProcess]:
    """Runs verl for the block; when it ends, by whatever means, nothing of verl is left."""
    verl = VerlProcess(command, log)
    try:
        yield verl
    finally:
        with deferred_signals():
            verl.end()


def _environment(command: Command, temporary: Path) -> dict[str, str]:
    """This process's, with the command's: a Ray of the run's own, and its modules found first.

    vLLM leaves sockets and locks in the temporary folder, so the run has one of its own.
    """
    foreign = {"RAY_ADDRESS", "VERL_USE_EXTERNAL_MODULES"}  # a cluster and modules of the shell's
    own = {name: value for name, value in os.environ.items() if name not in foreign}
    variables = own | command.environment
    paths = (command.environment["PYTHONPATH"], os.environ.get("PYTHONPATH"))
    return variables | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RAY_TMPDIR": str(temporary),
        "TMPDIR": str(temporary),
        **_private_services(temporary),
    }


def _private_services(temporary: Path) -> dict[str, str]:
    """What keeps other machines and other users of this machine out.

    Ray's services listen where its node's address is, and verl and vLLM ask Ray for that. It is
    127.0.0.1 where Ray may not form a cluster, a switch named for the systems on which that is the
    default. torch's store would listen on all interfaces, so ranks meet in a file, and that of a
    vLLM in one process where vLLM is told. Ray's own token would lie in the home folder for all to
    read.
    """
    return {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(),
        "DIST_INIT_METHOD": f"file://{temporary}/ranks",  # verl's name
        "VLLM_HOST_IP": "127.0.0.1",
    }
