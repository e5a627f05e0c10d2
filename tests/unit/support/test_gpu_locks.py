"""Each GPU is locked by one process at a time; the locks need no GPU."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from experiments.launch.preflight import check_devices
from experiments.study.schema import ROOT
from experiments.support.gpu_locks import (
    locked_gpus,
    require_gpus,
    reserved_devices,
    shares_of_gpus,
    visible_gpus,
)
from tests.study_files import changed_study
from tests.workflow.programs import write_nvidia_smi

HOLD = """
import sys
import tempfile
from pathlib import Path
from experiments.support.gpu_locks import locked_gpus
with locked_gpus(int(sys.argv[1]), Path(sys.argv[2])) as gpus:
    print(",".join(gpus), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,GPU-3")


def hold(num_gpus: int, folder: Path) -> subprocess.Popen[str]:
    """Another process that locks GPUs until its stdin is closed."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(num_gpus), str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def locked(process: subprocess.Popen[str]) -> list[str]:
    return process.stdout.readline().strip().split(",")


def test_slurm_jobs_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with locked_gpus(4) as first:
        monkeypatch.setenv("SLURM_JOB_ID", "2")
        with locked_gpus(4) as second:
            assert first == second == ["0", "1", "2", "GPU-3"]


def test_a_process_waits_until_enough_are_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold(3, tmp_path) as first:
        assert locked(first) == ["0", "1", "2"]
        with locked_gpus(1, tmp_path) as gpus:
            assert gpus == ["GPU-3"]
        assert capsys.readouterr().out == ""  # it did not have to wait
        with hold(4, tmp_path) as second:
            assert second.stdout.readline() == "waiting for 4 free GPUs (1 now)\n"
            first.stdin.close()
            lines = [second.stdout.readline()]
            while lines[-1].startswith("waiting"):
                lines.append(second.stdout.readline())
            assert lines[-1] == "0,1,2,GPU-3\n"


def test_gpus_of_a_killed_process_are_free_again(tmp_path: Path) -> None:
    other = hold(4, tmp_path)
    assert len(locked(other)) == 4
    other.send_signal(signal.SIGKILL)
    with locked_gpus(4, tmp_path) as gpus:
        assert len(gpus) == 4
    other.wait()


@pytest.mark.parametrize(
    ("variable", "gpus"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2", ["2"]),
        ("0,1", ["0", "1"]),
        ("0,-1,1", ["0"]),
    ],
)
def test_only_visible_gpus_are_lent(
    monkeypatch: pytest.MonkeyPatch, variable: str, gpus: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == gpus


def test_an_index_and_a_uuid_of_one_gpu_are_one_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_nvidia_smi(tmp_path, dict.fromkeys(("GPU-a", "GPU-b", "GPU-c"), "[N/A]"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus() == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,GPU-a")
    with hold(1, tmp_path / "locks") as other:
        assert locked(other) == ["GPU-b"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
        with locked_gpus(1, tmp_path / "locks") as gpus:
            assert gpus == ["0"]
    assert capsys.readouterr().out == ""  # it did not have to wait


def test_a_process_sees_its_own_gpus_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with reserved_devices("cpu", 2):
        assert visible_gpus() == ["0", "1", "2", "GPU-3"]
    with reserved_devices("cuda", 3):
        assert visible_gpus() == ["0", "1", "2"]
        with pytest.raises(ValueError, match="takes 4 GPUs and this machine shows 3"):
            require_gpus(4)


def set_memory(folder: Path, mib: str) -> None:
    write_nvidia_smi(folder / "bin", {"GPU-a": mib, "GPU-b": mib})


@pytest.fixture
def two_gpus_of_10_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an nvidia-smi; the folder of its locks."""
    set_memory(tmp_path, "10240")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return tmp_path


def test_runs_share_gpus_by_memory_and_evenly(
    two_gpus_of_10_gib: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = two_gpus_of_10_gib
    with ExitStack() as stack:
        taken = [stack.enter_context(locked_gpus(1, folder, 4.5)) for _ in range(4)]
        assert taken == [["0"], ["1"], ["0"], ["1"]]
        assert capsys.readouterr().out == ""
        monkeypatch.setattr("time.sleep", interrupt)
        with pytest.raises(KeyboardInterrupt), locked_gpus(1, folder, 4.5):
            pass
        assert capsys.readouterr().out == "waiting for 1 GPUs with 5 GiB free (0 now)\n"
        with pytest.raises(KeyboardInterrupt), locked_gpus(1, folder):
            pass
    with locked_gpus(1, folder) as whole, locked_gpus(1, folder, 1.0) as shared:
        assert (whole, shared) == (["0"], ["1"])
    assert shares_of_gpus(4.5) == 4


def interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


def test_a_study_that_wants_more_memory_than_a_gpu_has_is_refused_with_its_file(
    two_gpus_of_10_gib: Path,
) -> None:
    path = two_gpus_of_10_gib / "study.yaml"
    for memory_gib, line in ((10, None), (11, f"{path}: gpu_memory_gib: 11.0 is more than")):
        changes = {"device": "cuda", "gpu_memory_gib": memory_gib}
        study = changed_study(two_gpus_of_10_gib, changes)
        with pytest.raises(ValueError, match=line) if line else nullcontext():
            check_devices(study, path)


def test_all_of_a_large_machine_is_more_than_the_files_of_a_process(
    two_gpus_of_10_gib: Path,
) -> None:
    set_memory(two_gpus_of_10_gib, "143771")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with locked_gpus(2, two_gpus_of_10_gib) as gpus:
            assert gpus == ["0", "1"]
            assert len(os.listdir("/proc/self/fd")) > 2 * 140
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_memory_that_nvidia_smi_does_not_know_is_no_error(two_gpus_of_10_gib: Path) -> None:
    set_memory(two_gpus_of_10_gib, "[N/A]")
    with locked_gpus(2, two_gpus_of_10_gib) as gpus:
        assert gpus == ["0", "1"]
    with pytest.raises(ValueError, match=r"gpu_memory_gib: 2\.0 is more than"):
        require_gpus(1, 2.0)
