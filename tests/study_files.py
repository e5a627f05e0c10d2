"""The default study with a key changed, for tests of what a study file may say."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from experiments.study.load import load_study
from experiments.study.schema import STUDIES, Study

GOOD: dict[str, Any] = yaml.safe_load((STUDIES / "default_long.yaml").read_text())


def load_changed(tmp_path: Path, keys: str, value: Any) -> Study:
    """The default study with one dotted key changed."""
    content = deepcopy(GOOD)
    section = content
    *parents, last = keys.split("/")
    for key in parents:
        section = section[key]
    section[last] = value
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_study(path)
