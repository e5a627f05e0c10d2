"""A run's history on disk: damage is named with its file, and how to repair it."""

from pathlib import Path

import pytest

from experiments.runs.attempts import (
    list_attempts,
    next_attempt,
    read_history,
    write_results,
)
from experiments.runs.manifest import MANIFEST
from experiments.support.json_files import write_json
from tests.manifests import make_manifest


def test_the_hint_about_a_damaged_attempt_is_not_to_delete_the_file(tmp_path: Path) -> None:
    write_json(next_attempt(tmp_path).folder / MANIFEST, {})
    with pytest.raises(ValueError, match=r"1/manifest.json: run: missing; restore it, or"):
        read_history(tmp_path)


def test_a_damaged_line_of_metrics_is_named(tmp_path: Path) -> None:
    attempt = next_attempt(tmp_path)
    (attempt.folder / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n')
    with pytest.raises(ValueError, match=r"1/metrics.jsonl: line 2: not JSON \(.*; restore it"):
        attempt.rows()


def test_a_renamed_folder_is_not_an_attempt(tmp_path: Path) -> None:
    make_manifest().write(next_attempt(tmp_path).folder)
    (tmp_path / "attempts" / "1").rename(tmp_path / "attempts" / "old")
    assert list_attempts(tmp_path) == []
    assert next_attempt(tmp_path).number == 1


def test_results_of_a_finished_run_have_every_step(tmp_path: Path) -> None:
    attempt = next_attempt(tmp_path)
    make_manifest(status="finished").write(attempt.folder)
    for step in (1, 2, 3):
        attempt.append({"step": step})
    with pytest.raises(ValueError, match=r"step 4 is missing; restore it, or delete the run's"):
        write_results(tmp_path)
    attempt.append({"step": 4})
    write_results(tmp_path)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ("{}", "step: None is not a whole number of 1 or more"),
        ('{"step": 0}', "step: 0 is not a whole number"),
        ('{"step": 1.5}', "step: 1.5 is not a whole number"),
        ('{"step": true}', "step: True is not a whole number"),
        ('{"step": 1, "x": "1"}', "x: '1' is not a number"),
        ('{"step": 1, "x": [1]}', "x: [1] is not a number"),
        ('{"step": 1, "x": NaN}', "x: nan is not finite"),
        ('{"step": 1, "x": 1e999}', "x: inf is not finite"),
    ],
)
def test_an_invalid_row_is_named(tmp_path: Path, row: str, line: str) -> None:
    attempt = next_attempt(tmp_path)
    (attempt.folder / "metrics.jsonl").write_text(row + "\n")
    with pytest.raises(ValueError) as refused:
        attempt.rows()
    assert str(refused.value).startswith(f"{attempt.folder}/metrics.jsonl: line 1: {line}")
