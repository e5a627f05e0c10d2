"""Processes: what they print, leave and end with; signals that wait."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from experiments.study.schema import ROOT
from experiments.support.signals import STOP_SIGNALS, deferred_signals
from experiments.support.subprocess_call import call_in_subprocess, private_temporary_folder

TEE = """
import os, sys
from pathlib import Path
from experiments.support.cli import run_cli
from experiments.support.tee import tee_output
def main():
    print("printed")
    os.system("echo from another program")
    {ending}
with tee_output(Path("a/one.log"), Path("two.log")):
    run_cli(main)
print("after")
"""

# as Slurm ends a job; the process itself turns the signal into an exception, as the launcher does
TERMINATE_ALL = """
    import psutil, signal, time
    for process in psutil.Process().children():
        process.terminate()
    time.sleep(0.2)
    raise KeyboardInterrupt("SIGTERM")
"""

# more than the pipe holds, so that a tee that ended would be noticed
OUTLIVE_TERMINAL = """input()
    for i in range(20_000):
        print(f"line {i}")
    raise SystemExit
"""


@pytest.mark.parametrize(
    ("ending", "exit_code", "last_line"),
    [
        ("pass", 0, "from another program"),
        ("raise RuntimeError('broken')", 1, "RuntimeError: broken"),
        ("raise KeyboardInterrupt('SIGTERM')", 130, "stopped: SIGTERM"),
        (TERMINATE_ALL, 130, "stopped: SIGTERM"),
    ],
    ids=["returns", "raises", "is stopped", "is stopped with all that it started"],
)
def test_everything_printed_is_logged_too(
    tmp_path: Path, ending: str, exit_code: int, last_line: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TEE.format(ending=ending)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    log = (tmp_path / "a" / "one.log").read_text()
    assert done.returncode == exit_code
    assert log.splitlines()[:2] == ["printed", "from another program"]
    assert log.splitlines()[-1] == last_line
    assert log == (tmp_path / "two.log").read_text()
    assert done.stdout == log + ("after\n" if exit_code == 0 else "")


def test_program_and_log_outlive_the_terminal(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TEE.format(ending=OUTLIVE_TERMINAL)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout.readline() == "printed\n"
        program.stdout.close()  # as `| head -n 1` does
        program.stdin.write("the terminal is gone\n")
        program.stdin.close()
        assert program.stderr is not None and program.stderr.read() == ""
    assert program.returncode == 0
    assert (tmp_path / "two.log").read_text().splitlines()[-1] == "line 19999"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def leave_file() -> str:
    """As vLLM does with its rendezvous file."""
    path = Path(tempfile.gettempdir()) / "vllm_dist_0"
    path.write_text("left")
    return str(path)


def test_a_call_in_a_subprocess_leaves_nothing(shared: Path) -> None:
    left = Path(call_in_subprocess(leave_file))
    assert shared in left.parents and not left.exists()
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_this_process_and_its_children_leave_nothing(
    shared: Path, error: type[BaseException] | None
) -> None:
    try:
        with private_temporary_folder() as folder:
            assert Path(leave_file()).parent == folder
            command = [sys.executable, "-c", "import tempfile; tempfile.mkstemp()"]
            subprocess.run(command, check=True)
            assert len(list(folder.iterdir())) == 2
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        assert error is not None
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(shared)
    assert list(shared.iterdir()) == []


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
        call = psutil.Process(int(caller.stdout.readline()))
        caller.send_signal(how)
        try:
            assert caller.wait(LIMIT_S) == code
            call.wait(LIMIT_S)
        finally:
            caller.kill()
            with suppress(psutil.NoSuchProcess):
                call.kill()


@pytest.fixture
def handlers() -> Iterator[list[int]]:
    """Signals that reach the handlers in force outside."""
    seen: list[int] = []
    previous = {n: signal.signal(n, lambda n, frame: seen.append(n)) for n in STOP_SIGNALS}
    yield seen
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=["ctrl-c", "sigterm"])
def test_a_signal_arrives_after_the_block(handlers: list[int], number: int) -> None:
    with deferred_signals():
        signal.raise_signal(number)
        assert handlers == []
    assert handlers == [number]
    signal.raise_signal(number)
    assert handlers == [number, number], "the previous handlers are back"


def test_it_arrives_also_when_the_block_fails(handlers: list[int]) -> None:
    with pytest.raises(ZeroDivisionError), deferred_signals():
        signal.raise_signal(signal.SIGTERM)
        raise ZeroDivisionError
    assert handlers == [signal.SIGTERM]
