"""What libraries leave in the temporary folder is gone after a study."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from experiments.support.subprocess_call import call_in_subprocess
from experiments.support.temporary_folder import private_temporary_folder


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
