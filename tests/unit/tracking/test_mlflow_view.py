"""MLflow as a view: one run across attempts, truthful, and the same when rebuilt from files."""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from experiments.runs.attempts import list_attempts, next_attempt
from experiments.runs.evaluation import write_evaluations
from experiments.runs.manifest import RunManifest
from experiments.runs.metrics import Row
from experiments.support.json_files import write_jsonl
from experiments.tracking import ui
from experiments.tracking.live import TrackedRun
from experiments.tracking.publish import is_whole, publish_study
from experiments.tracking.rebuild import rebuild
from experiments.tracking.store import REQUEST_LIMITS, explained_errors, find_runs
from tests import records
from tests.records import pack
from tests.unit.tracking.conftest import use_store

pytestmark = pytest.mark.long

NAME = "nano_bf16_seed0"
HOUR_MS = 3_600_000
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}


@pytest.fixture
def broken_store(client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracks in a file that is not a database."""
    (tmp_path / "broken.db").write_text("not a database, and long enough to be looked at " * 50)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/broken.db")


def make_manifest(attempt: int = 1, status: str = "running", lr: float = 1e-6) -> RunManifest:
    config = {"rl": {"lr": lr, "steps": 4}, "arm": "bf16"}
    return records.make_manifest(
        attempt=attempt, status=status, config=config, digests={"config": f"lr {lr}"}
    )


def track(manifest: RunManifest, steps: range, status: str, resumes: bool = False) -> TrackedRun:
    """One attempt at a run, on disk and live in MLflow, as the launcher does it."""
    attempt = next_attempt(Path("results") / NAME)
    manifest.write(attempt.folder)
    tracked = TrackedRun("s", NAME)
    tracked.start(manifest, resumes)
    for step in steps:
        row = {"step": step, "k3": step / 10, "undefined": None, "timing_s/step": 3600.0}
        attempt.append(row)
        tracked.log_rows([row], [step])
    manifest = manifest.model_copy(update={"status": status})
    manifest.write(attempt.folder)
    tracked.finish(manifest)
    return tracked


def only_run(client: MlflowClient) -> Any:
    experiment = client.get_experiment_by_name("s")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def history(client: MlflowClient, run_id: str, key: str) -> dict[int, float]:
    """The last value a step."""
    return {point.step: point.value for point in client.get_metric_history(run_id, key)}


def test_steps_of_an_attempt_that_was_not_tracked_are_read_from_files(client: MlflowClient) -> None:
    track(make_manifest(), range(1, 3), "failed")
    for run in client.search_runs([client.get_experiment_by_name("s").experiment_id]):
        client.delete_run(run.info.run_id)  # as if the store had not answered then
    track(make_manifest(attempt=2), range(3, 5), "finished", resumes=True)
    assert set(history(client, only_run(client).info.run_id, "k3")) == {3, 4}
    ui.add_results(client, Path("results"))
    assert set(history(client, only_run(client).info.run_id, "k3")) == {1, 2, 3, 4}


def test_another_configuration_starts_another_mlflow_run(client: MlflowClient) -> None:
    track(make_manifest(lr=1e-6), range(1, 3), "failed")
    track(make_manifest(lr=1e-3), range(1, 2), "finished")
    run = only_run(client)
    assert run.data.params["rl.lr"] == "0.001"
    assert history(client, run.info.run_id, "k3") == {1: 0.1}


def test_an_earlier_run_of_the_same_name_is_not_gone_on_with(client: MlflowClient) -> None:
    track(make_manifest(), range(1, 3), "finished")
    own = make_manifest(status="finished")
    later = own.model_copy(update={"started_at": "2026-11-28T10:00:00+00:00"})
    for manifest, last, expected in ((own, 2, True), (own, 3, False), (later, 2, False)):
        rows: list[Row] = [{"step": step, "timing_s/step": 1.0} for step in range(1, last + 1)]
        assert is_whole(client, only_run(client), manifest, rows) == expected


def test_run_carries_params_tags_memory_and_manifest(client: MlflowClient) -> None:
    track(make_manifest(), range(1, 2), "finished")
    run = only_run(client)
    assert run.data.params == {"rl.lr": "1e-06", "rl.steps": "4", "arm": "bf16"}
    assert run.data.tags["git.commit"] == "abc" and run.data.tags["arm"] == "bf16"
    assert run.data.metrics["memory/predicted_bf16_gib"] == 0.5
    assert "memory/measured_packed_gib" not in run.data.metrics
    names = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert names == {"manifest.json", "config.yaml"}


def snapshot(client: MlflowClient) -> Any:
    """All that a run holds, except when it was logged and under which id."""
    run = only_run(client)
    tags = {key: value for key, value in run.data.tags.items() if not key.startswith("mlflow.")}
    metrics = {key: history(client, run.info.run_id, key) for key in run.data.metrics}
    artifacts = [artifact.path for artifact in client.list_artifacts(run.info.run_id)]
    return run.info.status, run.info.start_time, run.data.params, tags, metrics, artifacts


@pytest.mark.parametrize("status", ["finished", "failed"])
def test_rebuilt_view_equals_the_live_one(
    client: MlflowClient,
    empty_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
) -> None:
    track(make_manifest(), range(1, 4), "failed")
    track(make_manifest(attempt=2), range(3, 5), status, resumes=True)
    live = snapshot(client)
    rebuilt = use_store(shutil.copy(empty_store, tmp_path / "rebuilt.db"), monkeypatch)
    rebuild(Path("results"))
    assert snapshot(rebuilt) == live
    rebuild(Path("results"))  # and again: nothing is doubled
    assert snapshot(rebuilt) == live


@pytest.mark.parametrize("again", [lambda: rebuild(Path("results")), lambda: publish_no_claims()])
def test_a_deleted_experiment_is_restored_by_new_results(
    client: MlflowClient, capsys: pytest.CaptureFixture[str], again: Callable[[], None]
) -> None:
    track(make_manifest(), range(1, 3), "finished")
    client.delete_experiment(client.get_experiment_by_name("s").experiment_id)
    again()
    assert client.get_experiment_by_name("s").lifecycle_stage == "active"
    said = capsys.readouterr().out
    assert said.startswith("MLflow: experiment s had been deleted: restored\n")


def test_records_rebuild_too_with_steps_an_hour_apart(client: MlflowClient) -> None:
    folder = Path("results") / NAME
    folder.mkdir(parents=True)
    make_manifest(status="finished").write(folder)
    rows = [{"step": s, "k3": 0.1 * s, "timing_s/step": 3600.0, "x": None} for s in (1, 2)]
    write_jsonl(folder / "metrics.jsonl", rows)
    write_evaluations(folder, [records.make_evaluation([1, 1, 0, 1])])
    pack(Path("results"), Path("record"))
    rebuild(Path("record"))
    run = only_run(client)
    points = client.get_metric_history(run.info.run_id, "k3")
    assert [point.timestamp - run.info.start_time for point in points] == [HOUR_MS, 2 * HOUR_MS]
    assert "x" not in run.data.metrics
    assert run.data.metrics["eval/bf16/greedy"] == 0.75


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A server that takes connections and never answers."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        for name in REQUEST_LIMITS:
            monkeypatch.delenv(name, raising=False)
        yield uri


@pytest.mark.parametrize("store", ["broken_store", "silent_server"])
def test_a_store_out_of_reach_costs_seconds_and_one_warning_and_the_files_go_on(
    store: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    request.getfixturevalue(store)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        tracked = track(make_manifest(), range(1, 4), "finished")
    # 10 s seen: two requests of 5 s; MLflow's own limit is 120 s, seven times over
    assert time.monotonic() - started < 60
    warnings = [r.message for r in caplog.records if "MLflow stopped following" in r.message]
    assert len(warnings) == 1 and "experiments.tracking rebuild" in warnings[0]
    assert tracked.failure is not None
    (attempt,) = list_attempts(Path("results") / NAME)
    assert [row["step"] for row in attempt.rows()] == [1, 2, 3]


def publish_no_claims() -> None:
    Path("claims.json").write_text(json.dumps({"study": "s", "claims": []}))
    publish_study(Path(), Path("results"))


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("silent_server", "start the server and try again"),
        ("broken_store", r"broken.db: not usable as an .*; move the file away and"),
    ],
)
def test_publish_into_a_store_out_of_reach_says_what_to_do(
    store: str, message: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(store)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with pytest.raises(ValueError, match=message), explained_errors():
        publish_no_claims()


def test_rebuild_on_a_broken_store_says_so(broken_store: None) -> None:
    track(make_manifest(), range(1, 2), "finished")
    with pytest.raises(ValueError, match=rf"broken.db: MLflow refused results/{NAME}"):
        rebuild(Path("results"))


def test_runs_are_found_by_their_whole_name(client: MlflowClient) -> None:
    track(make_manifest(), range(1, 2), "finished")
    experiment_id = only_run(client).info.experiment_id
    assert len(find_runs(client, experiment_id, NAME)) == 1
    assert find_runs(client, experiment_id, NAME[:-1]) == []


RACER = """
import sys
from experiments.tracking.store import connect, find_or_create_experiment
find_or_create_experiment(connect(), "s")
"""


def test_processes_that_start_at_once_share_a_new_store(tmp_path: Path) -> None:
    # without taking turns, two processes that make the tables at once corrupt the store
    command = [sys.executable, "-c", RACER]
    racers = [subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT) for _ in range(4)]
    assert [racer.wait() for racer in racers] == [0, 0, 0, 0]
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    assert client.get_experiment_by_name("s") is not None
