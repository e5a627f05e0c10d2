"""side_by_side of a study with pretended programs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.launch.programs import Programs
from experiments.launch.side_by_side import SideBySide
from experiments.study.schema import Study

Program = tuple[str, str]  # module, and the run or base that it is for


def use(monkeypatch: pytest.MonkeyPatch, program: Callable[[list[str]], int]) -> None:
    """In the place of every program."""

    monkeypatch.setattr(Programs, "exit_code", lambda _, command, output: program(command))


def all_of(study: Study, folder: Path, deadline: float = float("inf")) -> SideBySide:
    return SideBySide(study, Path("study.yaml"), folder, jobs=3, deadline=deadline)
