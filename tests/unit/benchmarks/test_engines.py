"""Benchmarks of engines one by one: what a record to go on with must share."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks import engines
from experiments.benchmarks.engine_tables import TABLES, rows_of
from experiments.benchmarks.records import ENGINE_PACKAGES, shape_of

SETUP = {"hardware": {"gpus": ["GPU X"]}, "git": {"commit": "abc"}}


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(engines, "origin", lambda *_, **__: SETUP)
    monkeypatch.setattr(engines, "vllm_version", lambda: "0.24.0")
    monkeypatch.setattr(engines, "call_in_subprocess", lambda measure, *named: measure(*named))
    kernels = {"bf16": {}, "nvfp4": {"KERNELS_OF_THIS_TEST": "marlin"}}
    monkeypatch.setattr(engines, "PRECISIONS", kernels)
    monkeypatch.setenv("KERNELS_OF_THIS_TEST", "none")
    shape = shape_of({"share": 0.9}, *TABLES["serving"], ENGINE_PACKAGES)
    rows = rows_of("serving", {"m:bf16": {"old": True}})
    kept = {"benchmark": "serving", **SETUP, **shape, "rows": rows}
    (tmp_path / "record.json").write_text(json.dumps(kept))
    names = ["m:bf16", "m:nvfp4"]
    return argparse.Namespace(
        record=tmp_path / "record.json", engines=names, device="cpu", resume=True
    )


def measure(name: str, device: str) -> dict[str, Any]:
    return {"old": False, "kernels": os.environ["KERNELS_OF_THIS_TEST"]}


def recorded(arguments: argparse.Namespace) -> dict[str, tuple[bool, str | None]]:
    rows = json.loads(arguments.record.read_text())["rows"]
    return {row["engine"]: (row["old"], row.get("kernels")) for row in rows}


def test_a_resumed_record_keeps_its_engines_and_gets_the_others(
    arguments: argparse.Namespace,
) -> None:
    engines.record_engines(arguments, "serving", {"share": 0.9}, measure)
    assert recorded(arguments) == {"m:bf16": (True, None), "m:nvfp4": (False, "marlin")}


def test_a_record_of_another_setting_is_not_gone_on_with(arguments: argparse.Namespace) -> None:
    with pytest.raises(ValueError, match=r"record\.json: settings differs: name a new file"):
        engines.record_engines(arguments, "serving", {"share": 0.5}, measure)
