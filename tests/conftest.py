"""Checkpoints that many tests start from, and one folder for what PyTorch's compiler makes."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qat_core import convert
from qat_core.planning.recipe import Recipe
from tests.nano_models import write_nano

COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def pytest_configure(config: pytest.Config) -> None:
    """Engines in processes and folders of their own compile the same few sources, each once."""
    if COMPILED not in os.environ:  # else pytest-xdist's worker, which has that of its starter
        folder = tempfile.TemporaryDirectory(prefix="compiled-", ignore_cleanup_errors=True)
        os.environ[COMPILED] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped without one."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session", params=["nano-dense", "nano-moe"])
def nano_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer model of the architecture, random weights, with the character tokenizer."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    write_nano(request.param, folder, num_layers=1)
    return folder


@pytest.fixture
def refusal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What a program says on stderr as it refuses: in this process, which has its modules."""

    def call(main: Callable[[], None], *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        return capfd.readouterr().err

    return call


@pytest.fixture
def packed_dir(nano_dir: Path, tmp_path: Path) -> Path:
    """`nano_dir`, packed."""
    convert(nano_dir, tmp_path / "packed", Recipe.full())
    return tmp_path / "packed"
