"""Studies for the tests of the real programs."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.workflow.programs import SMOKE


@pytest.fixture
def write_study(tmp_path: Path) -> Callable[..., Path]:
    """Writes the smoke study with dotted keys changed; returns its file."""

    def write(**changes: Any) -> Path:
        content = deepcopy(yaml.safe_load(SMOKE.read_text()))
        for keys, value in changes.items():
            section = content
            *parents, last = keys.split("__")
            for key in parents:
                section = section[key]
            section[last] = value
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write
