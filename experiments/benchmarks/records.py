"""Records of benchmarks that are gone on with: one record has one machine, commit and setting."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.support.json_files import read_json


def read_continued(path: Path, setup: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record that is there already, or None.

    Args:
        path: its file.
        setup: what it must have been measured with: machine, versions, commit and settings.

    Raises:
        ValueError: the record is of another commit, machine or setting, or damaged.
    """
    if not path.exists():
        return None
    kept = read_json(path, "name a new file")
    for key, value in setup.items():
        if kept.get(key) != value:
            raise ValueError(f"{path}: {key} differs: name a new file")
    return kept
