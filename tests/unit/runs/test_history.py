"""A run's history on disk and in a record: attempts, what the next resumes, damage, means."""

import json
from pathlib import Path

import pandas as pd
import pytest

from experiments.rl.metric_names import K3_KL
from experiments.runs.attempts import (
    Attempt,
    list_attempts,
    list_run_dirs,
    merge_rows,
    next_attempt,
    read_history,
    resumable,
    write_results,
)
from experiments.runs.evaluation import EVALUATIONS, read_evaluations
from experiments.runs.manifest import MANIFEST, RunManifest
from experiments.runs.metrics import Row, token_mean
from experiments.runs.provenance import _read as read_named
from experiments.runs.record import FILES, RecordedRun, has_file, write_record
from experiments.support.json_files import write_json
from tests import records
from tests.records import make_manifest

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


def test_the_hint_about_a_damaged_attempt_is_not_to_delete_the_file(tmp_path: Path) -> None:
    write_json(next_attempt(tmp_path).folder / MANIFEST, {})
    with pytest.raises(ValueError, match=r"1/manifest.json: run: missing; restore it, or"):
        read_history(tmp_path)


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
        ('{"step": true}', "step: True is not a whole number"),
        ('{"step": 1, "x": "1"}', "x: '1' is not a number"),
        ('{"step": 1, "x": NaN}', "x: nan is not finite"),
        ('{"step"', "not JSON (Expecting ':' delimiter"),
    ],
)
def test_an_invalid_row_is_named(tmp_path: Path, row: str, line: str) -> None:
    attempt = next_attempt(tmp_path)
    (attempt.folder / "metrics.jsonl").write_text(row + "\n")
    with pytest.raises(ValueError) as refused:
        attempt.rows()
    assert str(refused.value).startswith(f"{attempt.folder}/metrics.jsonl: line 1: {line}")
    assert "; restore it, or delete the run's folder" in str(refused.value)


@pytest.mark.parametrize("kls", [[], [1.0, None]], ids=["no step", "overflowed"])
def test_there_is_no_mean_of(kls: list[float | None]) -> None:
    rows: list[Row] = [{"rollout_corr/k3_kl": kl, "response_length/mean": 10.0} for kl in kls]
    assert token_mean(rows, K3_KL) is None


VERIFIER = {"math-verify": "0.9.0", "other": None}
EVALUATION = records.make_evaluation([1, 0, 1], response_tokens_mean=0.1, verifier=VERIFIER)


def manifest_of(seed: int) -> RunManifest:
    return records.make_manifest(run=f"nano_bf16_seed{seed}", seed=seed, seeds={"run": seed})


def run_of(seed: int, *rows: dict[str, float | None], evaluated: bool = False) -> RecordedRun:
    evaluations = [EVALUATION.model_dump()] if evaluated else []
    manifest = manifest_of(seed).model_dump(mode="json")
    return RecordedRun(manifest, pd.DataFrame(rows), evaluations, None)


def two_runs() -> dict[str, RecordedRun]:
    rows = ({"step": 1, "a": 0.1, "b": None}, {"step": 2, "a": 1e-300, "b": None})
    evaluated = run_of(0, {"step": 1, "c": -0.0}, evaluated=True)
    return {"nano_bf16_seed1": run_of(1, *rows), "nano_bf16_seed0": evaluated}


@pytest.fixture
def record(tmp_path: Path) -> Path:
    write_record(tmp_path, two_runs())
    return tmp_path


def test_a_run_has_its_own_columns_and_undefined_is_not_absent(record: Path) -> None:
    first, second = list_run_dirs(record)
    assert read_history(first) == (manifest_of(0), [{"step": 1, "c": -0.0}])
    rows = [{"step": 1, "a": 0.1, "b": None}, {"step": 2, "a": 1e-300, "b": None}]
    assert read_history(second) == (manifest_of(1), rows)
    assert read_evaluations(first, "") == [EVALUATION]
    assert has_file(first, EVALUATIONS) and not has_file(second, EVALUATIONS)
    with pytest.raises(ValueError, match=r"evaluations.parquet: nano_bf16_seed1: missing; res"):
        read_evaluations(second, "")
    assert read_named(second)["seed"] == 1


def test_the_same_runs_give_the_same_bytes_and_others_are_read_anew(record: Path) -> None:
    before = {
        name: (record / name).read_bytes() for name in FILES.values() if (record / name).is_file()
    }
    write_record(record, dict(reversed(two_runs().items())))
    assert {name: (record / name).read_bytes() for name in before} == before
    write_record(record, {"nano_bf16_seed0": run_of(0, {"step": 1, "c": 3.0})})
    assert read_history(record / "nano_bf16_seed0")[1] == [{"step": 1, "c": 3.0}]


@pytest.mark.parametrize("flipped", [-9, 60])
def test_a_damaged_table_is_named(record: Path, flipped: int) -> None:
    path = record / "metrics.parquet"
    content = bytearray(path.read_bytes())
    content[flipped] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics.parquet: .*; restore it, or record the study"):
        read_history(record / "nano_bf16_seed0")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pd.DataFrame({"run": ["nano_bf16_seed0"], "a": [1.0]}), "no column step"),
        (pd.DataFrame({"run": ["nano_bf16_seed0"], "step": [0]}), "row 1: step: 0 is not a whole"),
        (pd.DataFrame({"run": ["x", "y", "x"], "step": [1, 1, 2]}), "x: rows of others between"),
        (pd.DataFrame({"run": ["x"], "step": [1]}), "nano_bf16_seed0: missing"),
        (
            pd.DataFrame({"run": ["nano_bf16_seed0"], "step": [1], "a": ["x"]}),
            "row 1: a: 'x' is not a number",
        ),
    ],
    ids=["no step", "step 0", "mixed", "no run", "text"],
)
def test_tables_of_another_form_are_refused(
    record: Path, table: pd.DataFrame, message: str
) -> None:
    table.to_parquet(record / "metrics.parquet", index=False)
    with pytest.raises(ValueError, match=rf"metrics.parquet: .*{message}"):
        read_history(record / "nano_bf16_seed0")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1: not JSON"),
        ([json.dumps({"run": "a"})] * 2, "line 2: run: 'a' is no new name"),
        ([json.dumps({"run": "a"})], "nano_bf16_seed0: missing"),
        ([json.dumps({"run": "nano_bf16_seed0"})], "nano_bf16_seed0: study: missing"),
    ],
    ids=["no JSON", "twice", "another", "damaged"],
)
def test_damaged_manifests_are_named(record: Path, lines: list[str], message: str) -> None:
    (record / "manifests.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"manifests.jsonl: {message}"):
        read_history(record / "nano_bf16_seed0")
