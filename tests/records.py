"""Runs and records for tests: manifests, and records read without the product's own reader."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from analysis.record import recorded_run
from experiments.runs.attempts import list_run_dirs
from experiments.runs.evaluation import Evaluation
from experiments.runs.manifest import RunManifest
from experiments.runs.record import write_record
from experiments.support.json_files import write_json, write_jsonl
from tests.files import set_keys


@cache
def _table(path: Path) -> pd.DataFrame:
    return pd.read_parquet(path)


def recorded_metrics(run_dir: Path) -> pd.DataFrame:
    """Of a committed record's run, a row a step."""
    rows = _table(run_dir.parent / "metrics.parquet")
    return rows[rows["run"] == run_dir.name].dropna(axis="columns", how="all").set_index("run")


def recorded_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Of a committed record's run."""
    rows: list[dict[str, Any]] = pq.read_table(
        run_dir.parent / "evaluations.parquet", filters=[("run", "==", run_dir.name)]
    ).to_pylist()
    return [row | {"settings": json.loads(row.get("settings") or "null")} for row in rows]


def recorded_manifest(run_dir: Path) -> dict[str, Any]:
    """Of a record's run."""
    lines = (run_dir.parent / "manifests.jsonl").read_text().splitlines()
    (found,) = (it for it in map(json.loads, lines) if it["run"] == run_dir.name)
    return dict(found)


def set_manifests(results: Path, **changes: Any) -> None:
    """Of all runs of a folder of results."""
    for run_dir in list_run_dirs(results):
        set_keys(run_dir / "manifest.json", **changes)


def change_manifest(run_dir: Path, **changes: Any) -> None:
    """Of a record's run."""
    path = run_dir.parent / "manifests.jsonl"
    manifests = list(map(json.loads, path.read_text().splitlines()))
    named = (it | (changes if it["run"] == run_dir.name else {}) for it in manifests)
    write_jsonl(path, named)


def pack(results: Path, record: Path) -> None:
    """The runs of results, or of another record, as a record."""
    write_record(record, {it.name: recorded_run(it) for it in list_run_dirs(results)})


def become_record(folder: Path) -> None:
    """Changes results into a record in their place."""
    run_dirs = list_run_dirs(folder)
    pack(folder, folder)
    for run_dir in run_dirs:
        shutil.rmtree(run_dir)


def unpack(run_dir: Path, results: Path) -> Path:
    """A recorded run as a folder among results; returns it."""
    run, folder = recorded_run(run_dir), results / run_dir.name
    folder.mkdir(parents=True)
    write_json(folder / "manifest.json", run.manifest)
    rows = run.metrics.astype(object).where(run.metrics.notna(), None)
    write_jsonl(folder / "metrics.jsonl", rows.to_dict("records"))
    if run.evaluations:
        write_json(folder / "eval.json", run.evaluations)
    return folder


HARDWARE = {"cpu": "cpu", "cores": 2, "memory_gib": 24.0, "gpus": []}
MANIFEST: dict[str, Any] = {
    "run": "nano_bf16_seed0",
    "study": "s",
    "model": "nano",
    "arm": "bf16",
    "seed": 0,
    "status": "running",
    "reason": None,
    "started_at": "2026-01-01T00:00:00+00:00",
    "attempt_started_at": "2026-01-01T00:00:00+00:00",
    "wall_s": None,
    "attempt": 1,
    "command": "python -m experiments.launch.run",
    "config": {"rl": {"lr": 1e-6, "steps": 4}, "arm": "bf16"},
    "git": {"commit": "abc", "dirty": False, "diff_sha256": "d"},
    "digests": {"config": "c", "code": "d"},
    "versions": {"python": "3.11"},
    "hardware": HARDWARE,
    "seeds": {"run": 0},
    "memory": {"predicted_bf16_gib": 0.5, "measured_bf16_gib": 0.5},
    "coverage": None,
}


def make_manifest(**changes: Any) -> RunManifest:
    """A manifest of a small BF16 run with some keys changed."""
    return RunManifest.model_validate(MANIFEST | changes)


def make_evaluation(correct: list[int], samples: int = 1, **changes: Any) -> Evaluation:
    """One of step 2 with so many right answers to each prompt, and with some keys changed."""
    asked = {"step": 2, "precision": "bf16", "decoding": "greedy", "samples_per_prompt": samples}
    found = {"prompts": len(correct), "correct": correct, "response_tokens_mean": 1.0}
    accuracy = sum(correct) / (len(correct) * samples)
    return Evaluation.model_validate(asked | found | {"accuracy": accuracy} | changes)
