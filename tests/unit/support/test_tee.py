"""Everything that a program prints reaches the terminal and its logs, however it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
        assert program.stdin is not None and program.stdout is not None
        assert program.stdout.readline() == "printed\n"
        program.stdout.close()  # as `| head -n 1` does
        program.stdin.write("the terminal is gone\n")
        program.stdin.close()
        assert program.stderr is not None and program.stderr.read() == ""
    assert program.returncode == 0
    assert (tmp_path / "two.log").read_text().splitlines()[-1] == "line 19999"
