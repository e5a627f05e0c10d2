"""The one renderer of benchmark records, from small ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.tables import benchmark_text

SETUP = {
    "hardware": {"gpus": ["GPU X"]},
    "versions": {"torch": "3.4", "transformers": "5.6"},
    "settings": {"rounds": 2048},
    "columns": {
        "call": {"heading": "Kernel"},
        "us": {"heading": "us", "format": ",.1f"},
        "ratio": {"heading": "of BF16's", "format": ".2f"},
        "goal": {"heading": "Goal", "format": "g", "bounds": "ratio"},
    },
    "note": "How to read it.",
}
ROW = {"call": "pack", "us": [1, 1036.44, 9000], "ratio": 1.01, "goal": 1.01, "hidden": True}


def _text(folder: Path, *records: dict[str, Any]) -> str:
    for number, record in enumerate(records):
        name = f"codec_x{number or ''}.json"
        (folder / name).write_text(json.dumps(SETUP | record))
    return benchmark_text("codec", folder, "x")


def test_a_row_has_its_columns_units_quartiles_and_goal(tmp_path: Path) -> None:
    rows = [ROW, ROW | {"us": None, "ratio": 1.0101}, ROW | {"goal": None}]
    assert _text(tmp_path, {"rows": rows}).splitlines() == [
        "Measured on: GPU X, torch 3.4, transformers 5.6, commit not recorded; rounds 2,048.",
        "",
        "| Kernel | us | of BF16's | Goal |",
        "| --- | --- | --- | --- |",
        "| pack | 1,036.4 (1.0 to 9,000.0) | 1.01 | 1.01, met |",
        "| pack |  | 1.01 | 1.01, **missed** |",
        "| pack | 1,036.4 (1.0 to 9,000.0) | 1.01 |  |",
        "",
        "How to read it.",
    ]


def test_settings_that_records_do_not_share_are_columns(tmp_path: Path) -> None:
    commit = {"git": {"commit": "0123456789", "dirty": False}}
    other = {"rows": [ROW], "settings": {"rounds": 2048, "host": "D"}, **commit}
    lines = _text(tmp_path, {"rows": [ROW]}, other).splitlines()
    assert lines[2].startswith("| commit | host | Kernel |") and "; rounds 2,048." in lines[0]
    assert lines[4].startswith("| not recorded |  | pack |")
    assert lines[5].startswith("| 0123456 | D | pack |")


@pytest.mark.parametrize("change", [{"ratio": "fast"}, {"us": []}, {"ratio": {}}])
def test_a_cell_that_its_column_cannot_hold_is_refused_by_name(
    change: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"(?s)codec_x\.json.*(ratio|us)"):
        _text(tmp_path, {"rows": [ROW | change]})


def test_a_row_without_a_column_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)codec_x\.json.*goal: missing"):
        _text(tmp_path, {"rows": [{key: ROW[key] for key in ("call", "us", "ratio")}]})
