"""Results on disk to pandas frames.

A run is a folder named by its run id, in a results folder (`metrics.jsonl`) or in a folder of
committed records (`metrics.csv.gz`); both hold `manifest.json` and `eval.json`. Damaged or missing
files are refused with their name and line, nothing is filled in.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.read import read_text
from analysis.results import Results
from experiments.runs.evaluation import read_evaluations
from experiments.runs.manifest import RunManifest, read_manifest

HINT = "run the study"


def load_results(folder: Path, run_ids: Sequence[str]) -> Results:
    """Reads the named runs of a results or records folder.

    Raises:
        ValueError: a file is missing or garbled, or a run is not finished.
    """
    manifests = {run_id: _read_manifest(folder / run_id) for run_id in run_ids}
    metrics = [_tag(read_metrics(folder / run_id), manifests[run_id]) for run_id in run_ids]
    evals = [_tag(_read_evals(folder / run_id), manifests[run_id]) for run_id in run_ids]
    return Results(
        pd.concat(metrics, ignore_index=True), pd.concat(evals, ignore_index=True), manifests
    )


def read_metrics(run_dir: Path) -> pd.DataFrame:
    """A run's metrics, one row a step in ascending order; of a repeated step the last row wins.

    Raises:
        ValueError: neither `metrics.jsonl` nor `metrics.csv.gz` is there, or a line is garbled.
    """
    recorded = run_dir / "metrics.csv.gz"
    rows = _read_csv(recorded) if recorded.exists() else _read_jsonl(run_dir / "metrics.jsonl")
    return rows.drop_duplicates("step", keep="last").sort_values("step", ignore_index=True)


def _read_jsonl(path: Path) -> pd.DataFrame:
    lines = read_text(path, HINT).splitlines()
    if not lines:
        raise ValueError(f"{path}: empty; delete the run's folder and train it again")
    return pd.DataFrame(
        [_parse_line(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]
    )


def _parse_line(line: str, where: str) -> dict[str, float | None]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}); remove the damaged line") from None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError(
            f"{where}: not an object with a whole number under 'step'; train the run again"
        )
    for key, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise ValueError(f"{where}: {key} is {value!r}, not a number; train the run again")
    return row


def _read_csv(path: Path) -> pd.DataFrame:
    try:
        rows = pd.read_csv(path)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path}: {error}; record the study again") from None
    texts = rows.select_dtypes(exclude="number").columns
    if "step" not in rows or len(texts):
        what = f"{texts[0]} is not a number" if len(texts) else "column step is missing"
        raise ValueError(f"{path}: {what}; record the study again")
    return rows


def _read_manifest(run_dir: Path) -> RunManifest:
    manifest = read_manifest(run_dir, HINT)
    if manifest.run != run_dir.name:
        raise ValueError(f"{run_dir}/manifest.json: run: it is of {manifest.run}; {HINT}")
    if manifest.status != "finished":
        reason = f" ({manifest.reason})" if manifest.reason else ""
        raise ValueError(
            f"{run_dir}/manifest.json: the run is {manifest.status}{reason}; run it to the end"
        )
    return manifest


def _read_evals(run_dir: Path) -> pd.DataFrame:
    evaluations = read_evaluations(run_dir, HINT)
    return pd.DataFrame([evaluation.model_dump() for evaluation in evaluations])


def _tag(rows: pd.DataFrame, manifest: RunManifest) -> pd.DataFrame:
    names = {"run": manifest.run, "model": manifest.model, "arm": manifest.arm}
    return pd.concat(
        [pd.DataFrame({**names, "seed": manifest.seed}, index=rows.index), rows], axis="columns"
    )
