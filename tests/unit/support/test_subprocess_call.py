"""A call in a subprocess ends with the process that waits for it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from experiments.study.schema import ROOT

CALL = """
from experiments.support.cli import run_cli
from experiments.support.signals import raise_stop_signals
from experiments.support.subprocess_call import call_in_subprocess
SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
if __name__ == "__main__":
    raise_stop_signals()
    run_cli(lambda: call_in_subprocess(exec, SLEEP))
"""
LIMIT_S = 30


@pytest.mark.parametrize(
    ("how", "code"),
    [(signal.SIGTERM, 130), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_call_ends_with_its_caller(how: signal.Signals, code: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CALL],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as caller:
        assert caller.stdout is not None
        call = psutil.Process(int(caller.stdout.readline()))
        caller.send_signal(how)
        try:
            assert caller.wait(LIMIT_S) == code
            call.wait(LIMIT_S)
        finally:
            caller.kill()
            with suppress(psutil.NoSuchProcess):
                call.kill()
