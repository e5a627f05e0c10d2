"""Results on disk to pandas frames.

A run is named by its folder, in a results folder or in a committed record, where it is rows of the
record's files (`experiments.runs.record`). Damaged or missing files are refused with their name and
line, nothing is filled in.
"""

from collections.abc import Hashable, Mapping
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd

from analysis.results import Results
from experiments.rl.metric_names import DRIFT_FILE, K3_KL, RESPONSE_TOKENS, REWARD
from experiments.runs.drift import read_drift
from experiments.runs.evaluation import EVALUATIONS, Precision
from experiments.runs.manifest import MANIFEST, RunManifest
from experiments.runs.metrics import METRICS, merge, read_rows, require_every_step
from experiments.runs.record import Record, file_of, has_file, record_of
from experiments.runs.settings import read_evaluations_of, read_run
from experiments.study.load import load_study
from experiments.study.schema import Run, Study
from experiments.support.json_files import DELETE

HINT = f"{DELETE}run the study"
TRAIN_AGAIN = "delete the run's folder and train it again"
# a mean over responses has a value whatever the policy does; k3 KL may overflow
ALWAYS_DEFINED = (REWARD, RESPONSE_TOKENS)
# two runs that agree in all of these at every step are one run
OF_A_RUN = (K3_KL, REWARD, RESPONSE_TOKENS, "actor/entropy", "actor/grad_norm")


def load_results(study: Study, folder: Path) -> Results:
    """Reads the runs of a study from a results folder or its record.

    Raises:
        ValueError: a file is missing or garbled, or a run is not finished, or was trained or
            evaluated with other settings, or answers were judged by several verifiers, or is a copy
            of another.
    """
    manifests = {run.id: _read_manifest(study, run, folder) for run in study.runs}
    frames = {
        run: read_metrics(folder / run.id, manifests[run.id].planned_steps) for run in study.runs
    }
    require_distinct_runs(frames)
    metrics = [_tag(frame, manifests[run.id]) for run, frame in frames.items()]
    answers = {
        run: _read_evals(study, folder / run.id, manifests[run.id].config["rl"]["steps"])
        for run in study.runs
    }
    _require_distinct_evaluations(answers)
    evals = [_tag(frame, manifests[run.id]) for run, frame in answers.items()]
    watched = [run_id for run_id in manifests if has_file(folder / run_id, DRIFT_FILE)]
    drift = {run_id: read_drift(folder / run_id) for run_id in watched}
    evaluations = pd.concat(evals, ignore_index=True)
    verifiers = evaluations.pop("verifier").drop_duplicates()
    if len(verifiers) > 1:
        raise ValueError(
            f"{folder}: eval.json: verifier: {' and '.join(verifiers)}: their verdicts do not "
            "compare; delete each eval.json and run the study, so that one of them judges all"
        )
    return Results(pd.concat(metrics, ignore_index=True), evaluations, manifests, drift)


def read_metrics(run_dir: Path, num_steps: int | None = None) -> pd.DataFrame:
    """A run's metrics, one row per step in ascending order; of a repeated step the last row wins.

    ValueError where there are fewer than `num_steps`.
    """
    record, path = record_of(run_dir), file_of(run_dir, METRICS)
    metrics = _of_record(record, run_dir) if record else _checked(_frame(run_dir), path)
    if num_steps and len(metrics) < num_steps:
        raise ValueError(f"{path}: step {len(metrics) + 1} is missing; {TRAIN_AGAIN}")
    return metrics.copy()


def _checked(metrics: pd.DataFrame, path: str) -> pd.DataFrame:
    if metrics.empty:
        raise ValueError(f"{path}: empty; {TRAIN_AGAIN}")
    if metrics["step"].tolist() != list(range(1, len(metrics) + 1)):
        require_every_step([{"step": it} for it in metrics["step"]], path, TRAIN_AGAIN)
    for key in metrics.columns.intersection(list(ALWAYS_DEFINED)):
        if (undefined := metrics["step"][metrics[key].isna()]).any():
            raise ValueError(f"{path}: step {undefined.iloc[0]}: {key} is undefined; {TRAIN_AGAIN}")
    return metrics


def _frame(run_dir: Path) -> pd.DataFrame:
    return pd.DataFrame(merge([read_rows(run_dir, HINT)]))


@lru_cache(maxsize=1000)  # claims and figures ask for the same runs; a changed record is another
def _of_record(record: Record, run_dir: Path) -> pd.DataFrame:
    frame = record.rows(METRICS, run_dir.name).to_pandas()
    is_sound = (
        all(dtype.kind in "if" for dtype in frame.dtypes)
        and not np.isinf(frame.to_numpy(float)).any()
        and frame["step"].tolist() == list(range(1, len(frame) + 1))
    )
    # else row by row, which names what is wrong
    return _checked(frame if is_sound else _frame(run_dir), file_of(run_dir, METRICS))


def require_distinct_runs(metrics: Mapping[Run, pd.DataFrame]) -> None:
    """Refuses copies, whatever time they took: they would count as seeds, arms or models."""
    values = {
        run: frame[[key for key in OF_A_RUN if key in frame]].to_numpy(float)
        for run, frame in metrics.items()
    }
    _require_distinct({run: (it.shape, it.tobytes()) for run, it in values.items()}, "metrics")


def _require_distinct_evaluations(evaluations: Mapping[Run, pd.DataFrame]) -> None:
    """As `require_distinct_runs`; all answers may be wrong, or right, in several runs."""
    trained = {run: frame[frame["step"] > 0] for run, frame in evaluations.items()}
    _require_distinct(
        {
            run: frame[["correct", "response_tokens_mean"]].to_json()
            for run, frame in trained.items()
            if frame["accuracy"].between(0, 1, inclusive="neither").any()
        },
        "evaluations",
    )


def _require_distinct(values: Mapping[Run, Hashable], what: str) -> None:
    first = dict[Hashable, Run]()
    for run, value in values.items():
        same = first.setdefault(value, run)
        if same != run:
            raise ValueError(
                f"{run.id}: has the {what} of {same.id} in every step: a copy, or what they differ "
                "in had no effect; delete its folder and train it again"
            )


@cache
def recorded_study(record: Path) -> Study:
    """The study of a record."""
    return load_study(record / "study.yaml")


def metric_of(metrics: pd.DataFrame, metric: str, where: str) -> pd.Series:
    """A column of a run's metrics; ValueError where it is not recorded."""
    if metric not in metrics:
        raise ValueError(f"{where}: metric {metric} is not recorded; train the run again")
    return metrics[metric]


def _read_manifest(study: Study, run: Run, folder: Path) -> RunManifest:
    manifest = read_run(study, run, folder, HINT)
    if manifest.status != "finished":
        reason = f" ({manifest.reason})" if manifest.reason else ""
        raise ValueError(
            f"{file_of(folder / run.id, MANIFEST)}: the run is {manifest.status}{reason}; run it "
            "to the end"
        )
    return manifest


def _read_evals(study: Study, run_dir: Path, num_steps: int) -> pd.DataFrame:
    evaluations, where = read_evaluations_of(study, run_dir, HINT), file_of(run_dir, EVALUATIONS)
    for it in evaluations:
        if it.step > num_steps:
            raise ValueError(f"{where}: step {it.step} is evaluated, of {num_steps}; {HINT}")
    # older files have greedy answers too, which nothing is judged by
    found = {(it.step, it.precision) for it in evaluations if it.decoding == "sampled"}
    whole = product({it.step for it in evaluations}, get_args(Precision))
    for step, precision in sorted(set(whole) - found):
        raise ValueError(f"{where}: step {step}: no sampled evaluation in {precision}; {HINT}")
    return pd.DataFrame(
        [it.model_dump(exclude={"settings"}) | {"verifier": str(it.verifier)} for it in evaluations]
    )


def _tag(rows: pd.DataFrame, manifest: RunManifest) -> pd.DataFrame:
    names = {"run": manifest.run, "model": manifest.model, "arm": manifest.arm}
    return pd.concat(
        [pd.DataFrame({**names, "seed": manifest.seed}, index=rows.index), rows], axis="columns"
    )
