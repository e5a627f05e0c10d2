"""A model or data that verl cannot use is refused before it starts."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("hydra", reason="needs requirements/engines.txt")

from experiments.study.schema import ROOT
from experiments.verl.command import RunPaths
from experiments.verl.data import SCHEMA
from experiments.verl.preflight import require_inputs


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A model and data as far as they are looked at."""
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir()
    (model / "config.json").write_text("{}")
    data.mkdir()
    for split in ("train", "test"):
        pq.write_table(SCHEMA.empty_table(), data / f"{split}.parquet")
    return RunPaths(ROOT, model, data, tmp_path / "checkpoints", tmp_path / "attempt")


def test_missing_model_is_refused(paths: RunPaths) -> None:
    (paths.model / "config.json").unlink()
    with pytest.raises(ValueError, match="model: no model there; make it with `snakemake"):
        require_inputs(paths)


def test_missing_data_is_refused(paths: RunPaths) -> None:
    (paths.data / "test.parquet").unlink()
    with pytest.raises(ValueError, match=r"test\.parquet: missing; make it with `snakemake"):
        require_inputs(paths)


def test_dataset_with_other_columns_is_refused(paths: RunPaths) -> None:
    table = SCHEMA.empty_table().rename_columns({"prompt": "question"})
    pq.write_table(table, paths.data / "train.parquet")
    with pytest.raises(
        ValueError, match=r"train\.parquet: column prompt is missing; it has data_source, question,"
    ):
        require_inputs(paths)
