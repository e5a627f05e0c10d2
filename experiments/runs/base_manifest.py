"""The manifest of a base checkpoint: which weights it has and where they come from."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from experiments.runs.manifest import MANIFEST
from experiments.support.json_files import read_model


class BaseManifest(BaseModel):
    """What runs read of it; it also says how the checkpoint was made."""

    model_config = ConfigDict(frozen=True, strict=True)

    weights: dict[str, str]
    weight_bytes: NonNegativeInt


def read_base_manifest(base_dir: Path) -> BaseManifest:
    """The manifest of a base checkpoint.

    Raises:
        ValueError: it is missing or damaged.
    """
    path = base_dir / MANIFEST
    if not path.is_file():
        raise ValueError(f"{path}: no base checkpoint; make it with `snakemake {path}`")
    return read_model(path, BaseManifest)
