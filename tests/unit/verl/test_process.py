"""A child leaves nothing behind, however it ends, and is watched from outside; real processes stand
in for verl."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from experiments.study.schema import ROOT
from experiments.support.gpu_locks import VISIBLE
from experiments.verl.command import Command
from experiments.verl.leftovers import LEFTOVERS_FILE, remove_leftovers
from experiments.verl.peak_memory import GPU_MEMORY, HOST_MEMORY, PeakMemory
from experiments.verl.process import running_verl

START_LIMIT_S = 30

# As Ray and vLLM do: a process in a session of its own that ignores SIGTERM, keeps shared memory
# and would outlive its parent.
STUBBORN = """
import signal, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = SharedMemory(create=True, size=4096)
resource_tracker.unregister("/" + memory.name, "shared_memory")
open(sys.argv[1], "w").write(memory.name)
time.sleep(600)
"""
VERL = """
import os, subprocess, sys, time
stubborn = [sys.executable, "-c", os.environ["STUBBORN"], sys.argv[1]]
subprocess.Popen(stubborn, start_new_session=True)
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.01)
open(os.environ["TMPDIR"] + "/left", "w").close()
print("started", flush=True)
"""


def command(then: str, marker: Path) -> Command:
    return Command(
        ["python", "-c", VERL + then, str(marker)], {"PYTHONPATH": str(ROOT), "STUBBORN": STUBBORN}
    )


def segment(marker: Path) -> Path:
    deadline = time.monotonic() + START_LIMIT_S
    while not marker.exists() or not marker.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return Path("/dev/shm") / marker.read_text()


def noted(folder: Path) -> str:
    return (folder / LEFTOVERS_FILE).read_text()


def stubborn_processes(marker: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(marker) in (process.info["cmdline"] or [])
    ]


@pytest.mark.parametrize(
    ("then", "code"),
    [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("time.sleep(600)", None)],
    ids=["finished", "failed", "stopped"],
)
def test_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, code: int | None
) -> None:
    monkeypatch.setattr("experiments.verl.process.GRACE_S", 0.5)
    marker, log = tmp_path / "segment", tmp_path / "verl.log"
    other = SharedMemory(create=True, size=4096)  # of another run on this machine
    with running_verl(command(then, marker), log) as verl:
        left = segment(marker)
        assert left.exists() and len(stubborn_processes(marker)) >= 1
        while (found := verl.exit_code()) != code:
            time.sleep(0.05)
        assert found == code
    assert stubborn_processes(marker) == []
    assert not left.exists() and Path("/dev/shm", other.name).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["segment", "verl.log"]
    assert log.read_text() == "started\n"
    other.close()
    other.unlink()


LAUNCHER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_process import command
from experiments.verl.process import running_verl
marker, log = Path(sys.argv[2]), Path(sys.argv[3])
with running_verl(command("time.sleep(600)", marker), log) as verl:
    while verl.exit_code() is None:
        time.sleep(0.05)
"""


def test_verl_ends_with_a_killed_launcher_and_the_rest_is_removed_later(tmp_path: Path) -> None:
    marker, log = tmp_path / "segment", tmp_path / "verl.log"
    arguments = ["-c", LAUNCHER, str(Path(__file__).parent), str(marker), str(log)]
    launcher = subprocess.Popen(
        [sys.executable, *arguments], env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    left = segment(marker)
    while not (log.exists() and log.read_text() and str(left) in noted(tmp_path)):
        time.sleep(0.05)
    (verl,) = (p for p in psutil.Process(launcher.pid).children() if p.ppid() == launcher.pid)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    verl.wait(START_LIMIT_S)  # it gets SIGTERM from the kernel, on which Ray shuts down
    for process in stubborn_processes(marker):  # which Ray itself would have ended
        process.kill()
    record = tmp_path / LEFTOVERS_FILE
    temporary = Path(record.read_text().splitlines()[0])
    assert left.exists() and (temporary / "left").exists()
    remove_leftovers(record)
    assert not left.exists() and not temporary.exists() and not record.exists()


GIB = 2**30
# answers with the memory of the GPUs it is asked for, index and MiB, from a file beside it
NVIDIA_SMI = """#!/bin/sh
for word in "$@"; do case "$word" in --id=*) ids="${word#--id=}";; esac; done
for id in $(echo "$ids" | tr , ' '); do sed -n "s/^$id //p" "$(dirname "$0")/used"; done
"""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    memory = SimpleNamespace(total=64 * GIB, available=60 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return memory


def test_the_largest_of_all_looks_counts(
    tmp_path: Path, host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, used = tmp_path / "nvidia-smi", tmp_path / "used"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv(VISIBLE, "1,2")
    peak = PeakMemory("cuda")
    for mib, available in (((900, 10, 2048), 50), ((900, 3072, 20), 40), ((900, 1, 1), 60)):
        used.write_text("".join(f"{i} {value}\n" for i, value in enumerate(mib)))
        host.available = available * GIB
        peak.look()
    assert peak.peaks_gib == {GPU_MEMORY: 3.0, HOST_MEMORY: 24.0}


def test_a_gpu_that_tells_nothing_is_left_out(
    host: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "nvidia-smi")
    monkeypatch.setenv(VISIBLE, "0")
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="[Not Supported]\n")
    )
    peak = PeakMemory("cuda")
    peak.look()
    assert peak.peaks_gib == {HOST_MEMORY: 4.0}
