"""A program's whole output, on the terminal and in files at once."""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def tee_output(*files: Path) -> Iterator[None]:
    """Copies everything that this process prints, tracebacks and warnings too, into `files`."""
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.dup(1), os.dup(2)
    tee = subprocess.Popen(
        # a terminal that goes away, as with `| head`, must not end the program or its log
        ["tee", "--output-error=warn-nopipe", *map(str, files)],
        stdin=subprocess.PIPE,
        preexec_fn=_outlive_signals,
    )
    assert tee.stdin is not None
    os.dup2(tee.stdin.fileno(), 1)
    os.dup2(tee.stdin.fileno(), 2)
    try:
        yield
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(terminal[0], 1)
        os.dup2(terminal[1], 2)
        tee.stdin.close()
        tee.wait()


def _outlive_signals() -> None:
    """A signal to all processes must not take the log away from the one that reports it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
