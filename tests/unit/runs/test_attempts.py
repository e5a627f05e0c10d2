"""A run's attempts: what a crash leaves, and what the next attempt may resume."""

from pathlib import Path

import pytest

from experiments.runs.attempts import (
    Attempt,
    list_attempts,
    merge_rows,
    next_attempt,
    read_history,
    resumable,
)
from tests.manifests import make_manifest

DIGESTS = {"config": "c", "code": "d"}


def make_attempt(run_dir: Path, status: str = "failed", config: str = "c") -> Attempt:
    attempt = next_attempt(run_dir)
    make_manifest(status=status, digests=DIGESTS | {"config": config}).write(attempt.folder)
    return attempt


def test_attempts_are_numbered_and_listed_by_number(tmp_path: Path) -> None:
    numbers = [make_attempt(tmp_path).number for _ in range(11)]
    assert numbers == list(range(1, 12))
    assert [attempt.number for attempt in list_attempts(tmp_path)] == numbers


def test_an_attempt_without_a_manifest_is_not_listed_but_its_number_is_spent(
    tmp_path: Path,
) -> None:
    next_attempt(tmp_path)
    assert list_attempts(tmp_path) == []
    assert next_attempt(tmp_path).number == 2


def test_of_a_repeated_step_the_later_attempt_wins(tmp_path: Path) -> None:
    first, second = make_attempt(tmp_path), make_attempt(tmp_path)
    for step in (1, 2, 3):
        first.append({"step": step, "x": 1.0})
    for step in (3, 4):
        second.append({"step": step, "x": None})
    assert merge_rows([first, second]) == [
        {"step": 1, "x": 1.0},
        {"step": 2, "x": 1.0},
        {"step": 3, "x": None},
        {"step": 4, "x": None},
    ]


def test_a_stopped_run_ends_with_its_last_attempt(tmp_path: Path) -> None:
    """The first attempt had gone further, by other steps than those that follow its checkpoint."""
    first, second = make_attempt(tmp_path), make_attempt(tmp_path, "finished")
    second.manifest.model_copy(update={"reason": "gate"}).write(second.folder)
    for step in range(1, 7):
        first.append({"step": step, "x": 1.0})
    for step in (3, 4):
        second.append({"step": step, "x": 2.0})
    _, rows = read_history(tmp_path)
    assert [(row["step"], row["x"]) for row in rows] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_a_last_line_cut_short_is_dropped(tmp_path: Path) -> None:
    attempt = make_attempt(tmp_path)
    attempt.append({"step": 1})
    with (attempt.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "x"')
    assert attempt.rows() == [{"step": 1}]


def test_not_a_number_is_refused_rather_than_written(tmp_path: Path) -> None:
    attempt = make_attempt(tmp_path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        attempt.append({"step": 1, "x": float("nan")})
    assert attempt.rows() == []


@pytest.mark.parametrize(
    ("attempts", "numbers"),
    [
        ([], []),
        ([("failed", "c"), ("failed", "c")], [1, 2]),
        ([("failed", "other"), ("failed", "c")], [2]),
        ([("failed", "c"), ("failed", "other")], []),
        ([("finished", "c"), ("failed", "c")], [2]),
        ([("failed", "c"), ("finished", "c")], []),
    ],
    ids=["none", "same", "changed before", "changed since", "repeated", "finished"],
)
def test_what_a_run_resumes(
    tmp_path: Path, attempts: list[tuple[str, str]], numbers: list[int]
) -> None:
    made = [make_attempt(tmp_path, status, config) for status, config in attempts]
    assert [attempt.number for attempt in resumable(made, DIGESTS)] == numbers
