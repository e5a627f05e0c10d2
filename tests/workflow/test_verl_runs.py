"""verl's trainers with NVFP4: one run, and the documentation of all of them."""

import json
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from experiments.study.schema import ROOT
from tests.workflow.verl_cases import CASES
from tests.workflow.verl_runs import RECORD, prepare, run, table

PAGE = ROOT / "docs" / "verl.md"


def test_the_page_says_what_was_recorded() -> None:
    record = json.loads(RECORD.read_text())
    assert [name for name in CASES if name in record["cases"]] == list(record["cases"])
    _, found, _ = PAGE.read_text().replace("<!-- end -->", "<!-- runs -->").split("<!-- runs -->")
    assert found.strip() == table(record)


@pytest.mark.slow
def test_every_sync_of_a_trainer_apart_from_its_rollouts_brings_its_bytes(tmp_path: Path) -> None:
    prepare(tmp_path / "base")
    found = run(CASES["one-step-off"], tmp_path / "base", tmp_path / "run")
    assert found["steps"] == 2 and found["syncs"] == 3 and found["packed"] == 14
