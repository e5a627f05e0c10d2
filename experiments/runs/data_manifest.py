"""data.json, which says what the data of a study of verl are and where they come from."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from experiments.rl.config import TaskConfig
from experiments.runs.provenance import digest_json, require_digests
from experiments.support.json_files import read_model

DATA_MANIFEST = "data.json"


class DataSplit(BaseModel):
    """What it says of a split, as far as runs depend on it."""

    sha256: str


class DataManifest(BaseModel):
    """What programs read of it."""

    model_config = ConfigDict(frozen=True)

    settings: str | None = Field(None, description="`data_digest`; older files have none")
    train: DataSplit
    test: DataSplit


def read_data_manifest(folder: Path) -> DataManifest:
    """The description of a study's data."""
    path = folder / DATA_MANIFEST
    if not path.is_file():
        raise ValueError(f"{path}: no data; make it with `snakemake {path}`")
    return read_model(path, DataManifest)


def check_data(folder: Path) -> None:
    """Compares a study's data with their description."""
    manifest = read_data_manifest(folder)
    digests = {"train.parquet": manifest.train.sha256, "test.parquet": manifest.test.sha256}
    require_digests(folder, digests)


def data_digest(task: TaskConfig) -> str:
    """What a study says of its data."""
    return digest_json(task.model_dump(mode="json"))
