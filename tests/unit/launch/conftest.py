"""A study, and side_by_side of it with programs that are pretended."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.launch.programs import Programs
from experiments.launch.side_by_side import SideBySide
from experiments.study.schema import Study
from tests.study_files import REMOVED, changed_study

Program = tuple[str, str]  # module, and the run or base that it is for


def use(monkeypatch: pytest.MonkeyPatch, program: Callable[[list[str]], int]) -> None:
    """In the place of every program."""

    monkeypatch.setattr(Programs, "exit_code", lambda _, command, output: program(command))


def all_of(study: Study, folder: Path, **options: Any) -> SideBySide:
    """Of all runs, unless options say otherwise."""
    options = {"jobs": 3, "runs": study.runs, "deadline": float("inf")} | options
    return SideBySide(study, Path("study.yaml"), folder, **options)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Two cells of one model and two arms, two seeds with bases of their own."""
    cells = {"low": {"lr": 1e-5}, "high": {"lr": 1e-3}}
    changes = {"arms": ["bf16", "nvfp4-qat"], "seeds": [0, 1], "own_base": True, "cells": cells}
    return changed_study(tmp_path, changes | {"models/nano-moe": REMOVED})


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs in the order in which they were begun; they write what the true ones write."""
    programs: list[Program] = []
    lock = threading.Lock()

    def pretend(command: list[str]) -> int:
        first = command.index("--study")
        options = dict(zip(command[first::2], command[first + 1 :: 2], strict=False))
        name = options.get("--run") or options.get("--model") or "data"
        with lock:
            programs.append((" ".join(command[2:first]), name))
        return 0

    use(monkeypatch, pretend)
    return programs
