"""MLflow follows a run while it trains; the files do not depend on it."""

import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import wraps
from typing import Concatenate, ParamSpec

import yaml
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from experiments.runs.manifest import RunManifest
from experiments.runs.metrics import Row
from experiments.support.json_files import flatten
from experiments.support.signals import deferred_signals
from experiments.tracking.glance import save_view, short_name
from experiments.tracking.run_log import Tracker
from experiments.tracking.store import RUN_TAG, connect, find_or_create_experiment, find_runs

STATUS = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED"}
TAGS = ("model", "arm", "seed", "attempt", "status", "reason", "command", "started_at")
TAG_SECTIONS = ("git", "digests", "versions", "hardware")
P = ParamSpec("P")


def _or_warn(
    method: Callable[Concatenate["TrackedRun", P], None],
) -> Callable[Concatenate["TrackedRun", P], None]:
    """Turns a failure of MLflow into one warning, after which nothing is tracked."""

    @wraps(method)
    def guarded(self: "TrackedRun", /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.failure is not None:
            return
        try:
            with deferred_signals():
                method(self, *args, **kwargs)
        except Exception as error:  # whatever its store raises must not end a training run
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            logging.warning(
                "MLflow stopped following %s (%s); metrics.jsonl is still written; restore the "
                "view with `python -m experiments.tracking rebuild`",
                self.name,
                self.failure,
            )

    return guarded


class TrackedRun(Tracker):
    """The MLflow run of one run id; after a failure it warns once and does nothing."""

    def __init__(self, study: str, name: str) -> None:
        self.study, self.name = study, name
        self.failure: str | None = None
        self.client: MlflowClient
        self.run_id: str

    @_or_warn
    def start(self, manifest: RunManifest, resumes: bool) -> None:
        """Opens the MLflow run: the previous attempt's if this one resumes it, else a new one."""
        self.client = connect()
        experiment_id = find_or_create_experiment(self.client, self.study)
        previous = find_runs(self.client, experiment_id, self.name)
        if previous and resumes:
            self.run_id = previous[0]
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            for run_id in previous:
                self.client.delete_run(run_id)
            started_ms = milliseconds(manifest.started_at)
            run = self.client.create_run(
                experiment_id,
                started_ms,
                {RUN_TAG: self.name},
                short_name(manifest.model, manifest.arm, manifest.cell, manifest.seed),
            )
            self.run_id = run.info.run_id
            save_view(self.client, experiment_id)
            params = [Param(key, str(v)) for key, v in flatten(manifest.config).items()]
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
    def finish(self, manifest: RunManifest) -> None:
        """Closes the MLflow run with its status, weight memory and manifest."""
        self._set_tags(manifest)
        memory = {f"memory/{key}": value for key, value in manifest.memory}
        self.log_rows([{"step": 0, **memory}], [now_ms()])
        self.client.log_dict(self.run_id, manifest.model_dump(mode="json"), "manifest.json")
        self.client.log_text(self.run_id, yaml.safe_dump(manifest.config), "config.yaml")
        self.client.set_terminated(self.run_id, STATUS[manifest.status], ended_ms(manifest))

    def _set_tags(self, manifest: RunManifest) -> None:
        content = manifest.model_dump(mode="json")
        chosen = {key: content[key] for key in TAGS}
        chosen |= flatten({key: content[key] for key in TAG_SECTIONS})
        tags = [RunTag(key, str(value)) for key, value in chosen.items()]
        self.client.log_batch(self.run_id, tags=tags)


def milliseconds(iso_time: str) -> int:
    """A time stamp in MLflow's unit."""
    return int(datetime.fromisoformat(iso_time).timestamp() * 1000)


def ended_ms(manifest: RunManifest) -> int:
    """When a run's last attempt ended, now where it has not said how long it took."""
    if manifest.wall_s is None:
        return now_ms()
    return milliseconds(manifest.attempt_started_at) + int(1000 * manifest.wall_s)


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)
