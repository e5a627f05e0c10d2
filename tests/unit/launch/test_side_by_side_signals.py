"""Signals to side_by_side: they end what it has begun, and it begins nothing more."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from experiments.launch.programs import Programs
from experiments.study.schema import ROOT, STUDIES
from experiments.support.cli import INTERRUPTED

# notes its start and fails when it is interrupted; side_by_side takes it for the interpreter
PROGRAM = """#!/bin/sh
trap 'exit {code}' INT
echo "$*" >> {folder}/starts
while :; do sleep 0.1; done
"""
SIDE_BY_SIDE = """
import sys
from experiments.launch.side_by_side import main
from experiments.support.cli import run_cli
sys.executable = sys.argv.pop(1)
run_cli(main)
"""


@contextmanager
def side_by_side_of(folder: Path, code: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has begun PROGRAM, which ends with that code at Ctrl-C."""
    program = folder / "program"
    program.write_text(PROGRAM.format(folder=folder, code=code))
    program.chmod(0o755)
    arguments = ["--study", str(STUDIES / "default_long.yaml"), "--results", str(folder)]
    with subprocess.Popen(
        [sys.executable, "-c", SIDE_BY_SIDE, str(program), *arguments, "--jobs", "1"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        # a shell's background jobs, of which these tests may be one, ignore it
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as study:
        try:
            while not (folder / "starts").exists():
                assert study.poll() is None
                time.sleep(0.05)
            yield study
        finally:
            with suppress(ProcessLookupError):
                os.killpg(study.pid, signal.SIGKILL)  # and what it has begun ends with it


@pytest.mark.parametrize("code", [130, 1], ids=["in a run", "in a run's own child"])
def test_ctrl_c_ends_what_runs_and_begins_nothing(tmp_path: Path, code: int) -> None:
    with side_by_side_of(tmp_path, code) as study:
        os.killpg(study.pid, signal.SIGINT)  # as a terminal does; programs are of other groups
        assert study.wait(timeout=100) == 130
    assert len((tmp_path / "starts").read_text().splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_runs_ends_with_side_by_side_alone(tmp_path: Path, number: signal.Signals) -> None:
    with side_by_side_of(tmp_path, 130) as study:
        (program,) = psutil.Process(study.pid).children()
        study.send_signal(number)
        program.wait(timeout=100)


def test_nothing_begins_after_a_stop(tmp_path: Path) -> None:
    """Nor does a program that another made room for, before it was interrupted."""
    programs = Programs()
    programs.stop()
    with (tmp_path / "log").open("w") as output:
        assert programs.exit_code(["touch", str(tmp_path / "begun")], output) == INTERRUPTED
    assert not (tmp_path / "begun").exists()


def test_a_stop_interrupts_what_runs(tmp_path: Path) -> None:
    programs = Programs()
    script = f": > {tmp_path}/begun; exec sleep 100"
    command = ["env", "--default-signal=INT", "sh", "-c", script]  # a shell's `&` ignores it
    with (tmp_path / "log").open("w") as output, ThreadPoolExecutor(1) as pool:
        ended = pool.submit(programs.exit_code, command, output)
        while not (tmp_path / "begun").exists():
            time.sleep(0.05)
        programs.stop()
        assert ended.result(timeout=90) == -signal.SIGINT
