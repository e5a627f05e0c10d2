"""The files of a record: read as written, the same bytes again, and damage is named."""

import json
from pathlib import Path

import pandas as pd
import pytest

from experiments.runs.attempts import list_run_dirs, read_history
from experiments.runs.evaluation import EVALUATIONS, Evaluation, read_evaluations
from experiments.runs.manifest import MANIFEST, RunManifest
from experiments.runs.provenance import _read as read_named
from experiments.runs.record import FILES, RecordedRun, has_file, open_record, write_record
from tests import manifests

EVALUATION = {
    "step": 1,
    "precision": "bf16",
    "decoding": "greedy",
    "prompts": 3,
    "samples_per_prompt": 1,
    "accuracy": 2 / 3,
    "correct": [1, 0, 1],
    "response_tokens_mean": 0.1,
    "settings": None,
    "device": None,
    "verifier": {"math-verify": "0.9.0", "other": None},
}


def manifest_of(seed: int) -> RunManifest:
    return manifests.make_manifest(run=f"nano_bf16_seed{seed}", seed=seed, seeds={"run": seed})


def run_of(seed: int, *rows: dict[str, float | None], evaluated: bool = False) -> RecordedRun:
    evaluations = [EVALUATION] if evaluated else []
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
    assert read_evaluations(first, "") == [Evaluation.model_validate(EVALUATION)]
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


def test_a_folder_of_results_is_no_record(tmp_path: Path) -> None:
    manifest_of(0).write(tmp_path)
    assert (tmp_path / MANIFEST).is_file() and open_record(tmp_path) is None


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
