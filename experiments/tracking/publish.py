"""MLflow as a view of the runs: it can be deleted and rebuilt from the files at any time.

One MLflow experiment a study, one MLflow run a run id across all its attempts, named alike, and
one run "study" with the claims and figures.
"""

import argparse
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec

import yaml
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from experiments.runs.attempts import Row, read_history
from experiments.runs.provenance import flatten
from experiments.study.load import load_study
from experiments.support.cli import RESULTS, STUDY, run_cli
from experiments.support.json_files import Json, read_json_list, write_json
from experiments.support.signals import deferred_interruption
from experiments.tracking.store import connect, find_or_create_experiment, find_runs, store_uri

SUMMARY = "study"
STATUS = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED"}
TAGS = ("model", "arm", "seed", "attempt", "status", "reason", "command", "started_at")
TAG_SECTIONS = ("git", "digests", "versions", "hardware")
P = ParamSpec("P")


def _or_warn(
    method: Callable[Concatenate["TrackedRun", P], None],
) -> Callable[Concatenate["TrackedRun", P], None]:
    """Turns a failure of MLflow into a loud warning: the files are the truth and go on."""

    @wraps(method)
    def guarded(self: "TrackedRun", /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.failure is not None:
            return
        try:
            with deferred_interruption():
                method(self, *args, **kwargs)
        except Exception as error:  # whatever its store raises must not end a training run
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            logging.warning(
                "MLflow stopped following %s (%s); metrics.jsonl goes on; mend the view with "
                "`python -m experiments.tracking.publish rebuild`",
                self.name,
                self.failure,
            )

    return guarded


class TrackedRun:
    """The MLflow run of one run id; after a failure it warns once and does nothing."""

    def __init__(self, study: str, name: str) -> None:
        self.study, self.name = study, name
        self.failure: str | None = None
        self.client: MlflowClient
        self.run_id: str

    @_or_warn
    def start(self, manifest: Json, goes_on: bool) -> None:
        """Opens the MLflow run: the former attempt's where this one goes on from it."""
        self.client = connect()
        experiment_id = find_or_create_experiment(self.client, self.study)
        former = find_runs(self.client, experiment_id, self.name)
        if former and goes_on:
            self.run_id = former[0]
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            for run_id in former:
                self.client.delete_run(run_id)
            started_ms = _milliseconds(manifest["started_at"])
            run = self.client.create_run(experiment_id, started_ms, run_name=self.name)
            self.run_id = run.info.run_id
            params = [Param(key, str(v)) for key, v in flatten(manifest["config"]).items()]
            self.client.log_batch(self.run_id, params=params)
        self._set_tags(manifest)

    @_or_warn
    def log_rows(self, rows: Sequence[Row], timestamps_ms: Sequence[int]) -> None:
        """Logs steps; what is undefined (None) is left out."""
        metrics = [
            Metric(key, value, timestamp_ms, int(row["step"] or 0))
            for row, timestamp_ms in zip(rows, timestamps_ms, strict=True)
            for key, value in row.items()
            if key != "step" and value is not None
        ]
        self.client.log_batch(self.run_id, metrics=metrics)

    @_or_warn
    def finish(self, manifest: Json) -> None:
        """Closes the MLflow run with its true status, its memory and its manifest."""
        self._set_tags(manifest)
        memory = {f"memory/{key}": value for key, value in manifest["memory"].items()}
        self.log_rows([{"step": 0, **memory}], [_now_ms()])
        self.client.log_dict(self.run_id, manifest, "manifest.json")
        self.client.log_text(self.run_id, yaml.safe_dump(manifest["config"]), "config.yaml")
        self.client.set_terminated(self.run_id, STATUS[manifest["status"]])

    def _set_tags(self, manifest: Json) -> None:
        chosen = {key: manifest[key] for key in TAGS}
        chosen |= flatten({key: manifest[key] for key in TAG_SECTIONS})
        tags = [RunTag(key, str(value)) for key, value in chosen.items()]
        self.client.log_batch(self.run_id, tags=tags)


def rebuild(folder: Path) -> None:
    """Makes the MLflow runs of a results or records folder again.

    Raises:
        ValueError: there is no such folder, or MLflow refused a run.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; name results or a folder of records")
    run_dirs = sorted(
        {p.parent for p in folder.glob("*_seed*/manifest.json")}
        | {p.parent for p in folder.glob("*_seed*/attempts")}
    )
    for run_dir in run_dirs:
        rebuild_run(run_dir)
    for study_dir in (folder / "studies").glob("*"):
        publish_summary(study_dir.name, study_dir)


def rebuild_run(run_dir: Path) -> str:
    """Makes the MLflow run of a run's folder again; returns its id.

    Raises:
        ValueError: MLflow refused it.
    """
    manifest, rows = read_history(run_dir)
    tracked = TrackedRun(manifest["study"], manifest["run"])
    tracked.start(manifest, goes_on=False)
    tracked.log_rows(rows, _timestamps_ms(manifest, rows))
    tracked.finish(manifest)
    if tracked.failure is not None:
        raise ValueError(f"{store_uri()}: MLflow refused {run_dir}: {tracked.failure}")
    publish_evaluations(tracked.client, tracked.run_id, run_dir)
    return tracked.run_id


def publish_evaluations(client: MlflowClient, run_id: str, run_dir: Path) -> None:
    """Adds a run's offline accuracies, where it has been evaluated."""
    if not (run_dir / "eval.json").exists():
        return
    now_ms = _now_ms()
    accuracies = [
        Metric(f"eval/{r['precision']}/{r['decoding']}", r["accuracy"], now_ms, r["step"])
        for r in read_json_list(run_dir / "eval.json")
    ]
    client.log_batch(run_id, metrics=accuracies)


def publish_summary(study: str, study_dir: Path) -> None:
    """Makes the run of the study itself, with its claims and figures as artifacts."""
    client = connect()
    experiment_id = find_or_create_experiment(client, study)
    for former in find_runs(client, experiment_id, SUMMARY):
        client.delete_run(former)
    run_id = client.create_run(experiment_id, run_name=SUMMARY).info.run_id
    client.log_artifacts(run_id, str(study_dir))
    client.set_terminated(run_id)


def publish(study_file: Path, results: Path, out: Path) -> None:
    """Adds what is known only after training; writes the ids of the MLflow runs to `out`."""
    study = load_study(study_file)
    client = connect()
    experiment_id = find_or_create_experiment(client, study.study)
    published = {}
    for run in study.runs:
        found = find_runs(client, experiment_id, run.id)
        if found:
            publish_evaluations(client, found[0], results / run.id)
        # none where the store was lost, or broke during the run
        published[run.id] = found[0] if found else rebuild_run(results / run.id)
    publish_summary(study.study, out.parent)
    write_json(out, published)


def _timestamps_ms(manifest: Json, rows: Iterable[Row]) -> list[int]:
    """When the steps ended, from the run's start and their durations."""
    moment_ms, timestamps = float(_milliseconds(manifest["started_at"])), []
    for row in rows:
        moment_ms += 1000 * (row.get("timing_s/step") or 0.0)
        timestamps.append(int(moment_ms))
    return timestamps


def _milliseconds(iso_time: str) -> int:
    return int(datetime.fromisoformat(iso_time).timestamp() * 1000)


def _now_ms() -> int:
    return int(time.time() * 1000)


def main() -> None:
    """Parses the command line: rebuild, or publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    again = commands.add_parser("rebuild", help="make the view again from files")
    again.add_argument("folder", type=Path, nargs="?", default=Path("results"))
    late = commands.add_parser(
        "publish", help="add evaluations, claims and figures of a study", parents=[STUDY, RESULTS]
    )
    late.add_argument("--out", type=Path, required=True, help="file for the ids of the runs")
    args = parser.parse_args()
    if args.command == "rebuild":
        rebuild(args.folder)
    else:
        publish(args.study, args.results, args.out)


if __name__ == "__main__":
    run_cli(main)
