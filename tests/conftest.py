"""Checkpoints that many tests start from, one compiler's folder for all, and the longest files."""

import os
import tempfile
from pathlib import Path

import pytest

from qat_core.checkpoint import convert
from qat_core.recipe import Recipe
from tests.nano_models import write_nano

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
# Of a minute or so and more. Were one the last to begin, other cores would wait for it. The two of
# verl are apart: at the same time its runs would take twice the memory.
LONGEST = (
    "workflow/test_verl.py",
    "workflow/test_smoke_study.py",
    "workflow/test_resume.py",
    "integration/test_vllm_tensor_parallel.py",
    "integration/test_evaluate.py",
    "integration/test_vllm_families.py",
    "workflow/test_verl_runs.py",
    "workflow/test_dry_run.py",
    "workflow/test_bad_input.py",
    "kernels/test_interpreter.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Engines in processes and folders of their own compile the same few sources, each once."""
    if COMPILED not in os.environ:  # else pytest-xdist's worker, which has that of its starter
        folder = tempfile.TemporaryDirectory(prefix="compiled-", ignore_cleanup_errors=True)
        os.environ[COMPILED] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, in their order, the others as they were collected."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="session", params=["nano-dense", "nano-moe"])
def nano_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer model of the architecture, random weights, with the character tokenizer."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    write_nano(request.param, folder, num_layers=1)
    return folder


@pytest.fixture
def packed_dir(nano_dir: Path, tmp_path: Path) -> Path:
    """`nano_dir`, packed."""
    convert(nano_dir, tmp_path / "packed", Recipe.full())
    return tmp_path / "packed"
