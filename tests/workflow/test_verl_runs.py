"""verl's trainers with NVFP4: one run, and the documentation of all of them."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from experiments.study.schema import ROOT
from tests.workflow import verl_runs
from tests.workflow.verl_cases import Case
from tests.workflow.verl_runs import CASES, RECORD, prepare, run, table

PAGE = ROOT / "docs" / "verl.md"


def test_the_page_says_what_was_recorded() -> None:
    record = json.loads(RECORD.read_text())
    assert [name for name in CASES if name in record["cases"]] == list(record["cases"])
    assert not any(case["git"]["dirty"] for case in record["cases"].values())
    _, found, _ = PAGE.read_text().replace("<!-- end -->", "<!-- runs -->").split("<!-- runs -->")
    assert found.strip() == table(record["cases"])


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ("ab bc", None),
        ("ab ac", "not the weights that were saved are sent after loading"),
        ("ab bb", "weights did not change between syncs"),
        ("bb bc", "weights did not change between syncs"),
    ],
)
def test_a_resumed_run_starts_with_the_weights_last_sent_and_trains_on(
    sent: str, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = iter(sent.split())

    def train(_case: Case, _folder: Path, out: Path) -> dict[str, Any]:
        out.mkdir(parents=True)
        for sync, weights in enumerate(next(contents)):
            (out / f"sent-1-{sync}.json").write_text(json.dumps({"weight": weights}))
        return {"steps": 1, "syncs": 2, "metrics": {"actor/grad_norm": [1.0]}}

    monkeypatch.setattr(verl_runs, "_train", train)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        found = run(CASES["resumed"], tmp_path, tmp_path / "out")
        assert found == {"steps": 2, "syncs": 4, "metrics": {"actor/grad_norm": [1.0, 1.0]}}


@pytest.mark.parametrize(
    ("received", "message"),
    [
        ("a abc", None),
        ("a ab", "not the bytes that were sent"),
        ("a acb", "2: not in the order in which they were sent"),
        ("d abc", "not the bytes that were sent"),
    ],
)
def test_of_two_pools_each_sync_reaches_one(
    received: str, message: str | None, tmp_path: Path
) -> None:
    sides = {"sent-0": "aabc"} | {
        f"received-{i}": contents for i, contents in enumerate(received.split(), 1)
    }
    for side, contents in sides.items():
        for sync, weights in enumerate(contents):
            (tmp_path / f"{side}-{sync}.json").write_text(json.dumps({"w:codes": weights}))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        found = verl_runs._syncs_of_pools(tmp_path)
        assert found == {"syncs": 4, "receivers": 2, "tensors": 1, "packed": 1}


@pytest.mark.long
def test_every_sync_of_a_trainer_apart_from_its_rollouts_brings_its_bytes(tmp_path: Path) -> None:
    case = CASES["one-step-off"]
    prepare(tmp_path / "base", [case])
    found = run(case, tmp_path / "base", tmp_path / "run")
    assert found["steps"] == 2 and found["syncs"] == 3 and found["packed"] == 14
