"""How long recorded runs took, as their manifests say."""

from pathlib import Path
from typing import Any

import pytest

from analysis.documents import RECORDS, written
from tests.manifests import HARDWARE, make_manifest


def record(root: Path, seed: int, started: str, wall_s: float, **changes: Any) -> None:
    """A finished run in a record."""
    finished = {"status": "finished", "attempt_started_at": started, "wall_s": wall_s}
    run = {"run": f"nano_bf16_seed{seed}", "seed": seed, "seeds": {"run": seed}}
    manifest = make_manifest(**finished, **run, **changes)
    folder = root / RECORDS / manifest.study / manifest.run
    folder.mkdir(parents=True)
    manifest.write(folder)


def rows(root: Path) -> list[list[str]]:
    """The cells of the table."""
    lines = written("{{ times() }}", root, root).splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]


def test_a_row_has_runs_range_sum_and_the_most_at_once(tmp_path: Path) -> None:
    record(tmp_path, 0, "2026-01-01T00:00:00+00:00", 1800.4)
    record(tmp_path, 1, "2026-01-01T00:20:00+00:00", 600.0)  # ends before the first does
    record(tmp_path, 2, "2026-01-01T00:30:01+00:00", 4800.0)  # starts after both
    made_by = "commit abc on 2 cores of cpu"
    assert rows(tmp_path) == [["`s`", "3", made_by, "600 to 4800", "2.0", "2"]]


@pytest.mark.parametrize(
    "change",
    [
        {"study": "t"},
        {"git": {"commit": "def", "dirty": False, "diff_sha256": "d"}},
        {"hardware": HARDWARE | {"gpus": ["GPU X"]}},
    ],
    ids=["study", "commit", "machine"],
)
def test_another_study_commit_or_machine_is_another_row(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    record(tmp_path, 0, "2026-01-01T00:00:00+00:00", 10.0)
    record(tmp_path, 1, "2026-01-01T00:00:00+00:00", 20.0, **change)
    assert [(row[1], row[3]) for row in rows(tmp_path)] == [("1", "10 to 10"), ("1", "20 to 20")]


def test_runs_that_were_cut_off_are_marked(tmp_path: Path) -> None:
    record(tmp_path, 0, "2026-01-01T00:00:00+00:00", 10.0)
    record(tmp_path, 1, "2026-01-01T00:00:00+00:00", 20.0, attempt=2)
    assert rows(tmp_path)[0][3] == "10 to 20 *"
