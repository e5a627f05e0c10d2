"""Studies of the repository with keys changed, for tests of what a study file may say."""

from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml

from experiments.study.load import load_study
from experiments.study.schema import STUDIES, Study

REMOVED: Any = object()


def study_content(name: str) -> dict[str, Any]:
    """What the file of a study says."""
    return yaml.safe_load((STUDIES / f"{name}.yaml").read_text())


def write_study(
    folder: Path, changes: Mapping[str, Any], source: str | Path = "default_long"
) -> Path:
    """A study's file with keys changed: `rl/lr` is one of a section, REMOVED takes a key away."""
    path = STUDIES / f"{source}.yaml" if isinstance(source, str) else source
    content = yaml.safe_load(path.read_text())
    for keys, value in changes.items():
        *parents, last = keys.split("/")
        section = reduce(getitem, parents, content)
        if value is REMOVED:
            del section[last]
        else:
            section[last] = value
    written = folder / "study.yaml"
    written.write_text(yaml.safe_dump(content, sort_keys=False))
    return written


def changed_study(
    folder: Path, changes: Mapping[str, Any], source: str | Path = "default_long"
) -> Study:
    """As `write_study` writes it."""
    return load_study(write_study(folder, changes, source))
