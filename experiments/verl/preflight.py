"""What can be refused before Ray starts, refused in a second instead of in minutes."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq

from experiments.study.schema import Run, Study
from experiments.verl.command import RunPaths, run_paths, run_settings
from experiments.verl.data import SCHEMA
from experiments.verl.known_keys import require_known


def require_known_settings(study: Study, runs: Iterable[Run]) -> None:
    """Checks what the runs set against what verl knows, an arm of a model once.

    Raises:
        ValueError: verl is not installed, or a line a key, "<file>: <key>: <what>; <fix>".
    """
    one_seed = {(run.model, run.arm): run for run in runs}
    nowhere = Path("/nowhere")  # absolute: a relative path could be a name of the hub
    for run in one_seed.values():
        require_known(run_settings(study, run, run_paths(study, run, nowhere, nowhere, nowhere)))


def require_inputs(paths: RunPaths) -> None:
    """Checks the model and the data that a run reads."""
    if not (paths.model / "config.json").is_file():
        raise ValueError(f"{paths.model}: no model there; make it with `snakemake {paths.model}`")
    for split in ("train", "test"):
        _require_columns(paths.data / f"{split}.parquet")


def _require_columns(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path}: missing; make it with `snakemake {path}`")
    found = pq.read_schema(path)
    missing = [name for name in SCHEMA.names if name not in found.names]
    if missing:
        raise ValueError(
            f"{path}: column {missing[0]} is missing; it has {', '.join(found.names)}; make the "
            "file again with experiments.verl.data"
        )
