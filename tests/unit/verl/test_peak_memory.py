"""Memory of a run seen from outside: the fullest of its own GPUs at any look, and the host."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from experiments.support.gpu_locks import VISIBLE
from experiments.verl.peak_memory import GPU_MEMORY, HOST_MEMORY, PeakMemory

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
