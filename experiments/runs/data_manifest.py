"""data.json, which says what the data of a study of verl are and where they come from."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from experiments.runs.provenance import digest_file, digest_json
from experiments.support.json_files import read_model
from qat_core.rl.config import TaskConfig

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
    """The description of a study's data.

    Raises:
        ValueError: it is missing or damaged.
    """
    path = folder / DATA_MANIFEST
    if not path.is_file():
        raise ValueError(f"{path}: no data; make it with `snakemake {path}`")
    return read_model(path, DataManifest)


def check_data(folder: Path) -> None:
    """Compares a study's data with their description.

    Raises:
        ValueError: a file is missing or damaged; names it.
    """
    manifest = read_data_manifest(folder)
    for split, described in (("train", manifest.train), ("test", manifest.test)):
        path = folder / f"{split}.parquet"
        if not path.is_file():
            raise ValueError(f"{path}: missing; delete {folder} and run the study again")
        if digest_file(path) != described.sha256:
            raise ValueError(
                f"{path}: damaged or changed, its SHA-256 differs; delete {folder} and run the "
                "study again"
            )


def data_digest(task: TaskConfig) -> str:
    """What a study says of its data."""
    return digest_json(task.model_dump(mode="json"))
