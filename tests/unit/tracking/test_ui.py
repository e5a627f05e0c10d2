"""What `make ui` reads before it shows the runs, and what it starts, on this machine alone."""

import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient
from mlflow.server.security_utils import (
    get_allowed_hosts_from_env,
    get_allowed_origins_from_env,
    is_allowed_host_header,
    should_block_cors_request,
)

from experiments.runs.evaluation import write_evaluations
from experiments.runs.manifest import read_manifest
from experiments.runs.record import MANIFESTS
from experiments.study.schema import ROOT
from experiments.support.json_files import write_jsonl
from experiments.tracking import publish, rebuild, ui
from experiments.tracking.__main__ import main
from experiments.tracking.store import RUN_TAG, STORE_VARIABLE
from tests.records import make_evaluation, make_manifest, pack
from tests.workflow import programs

STUDIES = ("a", "b")
STUDY_FILE = ROOT / "experiments" / "studies" / "default.yaml"
RUNS = ("nano_bf16_seed0", "nano_bf16_seed1")


def write_run(folder: Path, study: str, run: str, status: str = "finished") -> Path:
    run_dir = folder / run
    run_dir.mkdir(parents=True)
    seed = int(run[-1])
    make_manifest(study=study, run=run, seed=seed, seeds={"run": seed}, status=status).write(
        run_dir
    )
    write_steps(run_dir, 2)
    return run_dir


def write_steps(run_dir: Path, count: int) -> None:
    rows = [{"step": n, "k3": 0.1 * n, "timing_s/step": 1.0} for n in range(1, count + 1)]
    write_jsonl(run_dir / "metrics.jsonl", rows)


def write_claims(folder: Path, study: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "claims.json").write_text(json.dumps({"study": study, "claims": []}))
    return folder / "claims.json"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Two studies of one run."""
    for study in STUDIES:
        write_run(tmp_path / study, study, RUNS[0])
        pack(tmp_path / study, tmp_path / "records" / study)
        write_claims(tmp_path / "records" / study, study)
    return tmp_path / "records"


def add_records(client: MlflowClient, records: Path, but: Collection[str] = ()) -> None:
    for study in STUDIES:
        ui.add_record(client, records / study, set(but))


def held(client: MlflowClient) -> dict[str, list[str]]:
    """The runs of each study in the store."""
    experiments = [it for it in client.search_experiments() if it.name != "Default"]
    return {
        it.name: sorted(run.data.tags[RUN_TAG] for run in client.search_runs([it.experiment_id]))
        for it in experiments
    }


def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of runs that are read from now on."""
    folders = []

    def noted(run_dir: Path) -> str:
        folders.append(run_dir)
        return rebuild_run(run_dir)

    rebuild_run = publish.rebuild_run
    monkeypatch.setattr(rebuild, "rebuild_run", noted)
    monkeypatch.setattr(ui, "rebuild_run", noted)
    return folders


def interrupt(monkeypatch: pytest.MonkeyPatch, target: str, at_call: int) -> None:
    """Ctrl-C at that call of a method of MLflow's client."""
    calls = []
    method = getattr(MlflowClient, target)

    def stopped(self: MlflowClient, *args: object, **kwargs: object) -> object:
        calls.append(args)
        if len(calls) == at_call:
            raise KeyboardInterrupt
        return method(self, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, target, stopped)


# of each record a run, then the study's own
@pytest.mark.parametrize(
    ("method", "at_call"), [("create_run", 2), ("set_terminated", 1), ("create_run", 3)]
)
def test_records_that_an_interruption_cut_off_are_read_by_the_next_start(
    client: MlflowClient, records: Path, method: str, at_call: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        interrupt(patched, method, at_call)
        with pytest.raises(KeyboardInterrupt):
            add_records(client, records)
    add_records(client, records)
    assert held(client) == {study: [RUNS[0], publish.STUDY_RUN] for study in STUDIES}


def test_a_record_is_read_once_and_again_when_it_has_changed(
    client: MlflowClient, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_records(client, records)
    folders = read(monkeypatch)
    add_records(client, records)
    assert folders == []
    for file in ("claims.json", "manifests.jsonl"):  # another content, the same meaning
        (records / "b" / file).write_text((records / "b" / file).read_text().rstrip() + " \n")
        add_records(client, records)
    write_steps(records.parent / "b" / RUNS[0], 3)
    pack(records.parent / "b", records / "b")
    add_records(client, records)
    assert folders == 3 * [records / "b" / RUNS[0]]


def test_results_that_an_interruption_cut_off_are_read_by_the_next_start(
    client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    for run in RUNS:
        write_run(results, "a", run)
    write_claims(results / "studies" / "a", "a")
    for method, at_call in (("create_run", 2), ("log_batch", 2), ("set_terminated", 2)):
        with pytest.MonkeyPatch.context() as patched:
            interrupt(patched, method, at_call)
            with pytest.raises(KeyboardInterrupt):
                ui.add_results(client, results)
    assert ui.add_results(client, results) == {"a"}
    assert held(client) == {"a": [*RUNS, publish.STUDY_RUN]}
    folders = read(monkeypatch)
    ui.add_results(client, results)
    assert folders == []


def test_runs_that_train_are_left_alone(
    client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = write_run(tmp_path / "results", "a", RUNS[0], "running")
    (tmp_path / "results" / RUNS[1] / "attempts" / "1").mkdir(parents=True)  # waits for a GPU
    ui.add_results(client, tmp_path / "results")
    folders = read(monkeypatch)
    write_steps(run_dir, 3)
    ui.add_results(client, tmp_path / "results")
    assert folders == []
    read_manifest(run_dir, "").model_copy(update={"status": "finished"}).write(run_dir)
    ui.add_results(client, tmp_path / "results")
    assert folders == [run_dir]


def test_a_run_of_this_machine_takes_the_place_of_its_record_that_was_read_before(
    client: MlflowClient, records: Path, tmp_path: Path
) -> None:
    write_run(tmp_path / "a", "a", RUNS[1])
    pack(tmp_path / "a", records / "a")
    add_records(client, records)
    run_dir = write_run(tmp_path / "results", "a", RUNS[0])
    later = "2026-11-23T10:00:00+00:00"
    read_manifest(run_dir, "").model_copy(update={"started_at": later}).write(run_dir)
    own = ui.add_results(client, tmp_path / "results")
    add_records(client, records, own)
    assert held(client) == {"a": [RUNS[0]], "b": [RUNS[0], publish.STUDY_RUN]}
    experiment = client.get_experiment_by_name("a")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.tags["started_at"] == later
    shutil.rmtree(tmp_path / "results")
    add_records(client, records, ui.add_results(client, tmp_path / "results"))
    assert held(client)["a"] == [*RUNS, publish.STUDY_RUN]


def test_what_has_changed_is_read_again(
    client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    run_dir = write_run(results, "a", RUNS[0])
    claims = write_claims(results / "studies" / "a", "a")
    ui.add_results(client, results)
    folders = read(monkeypatch)
    write_evaluations(run_dir, [make_evaluation([1, 0])])
    claims.write_text(json.dumps({"study": "a", "claims": [], "marks": {"nano": ["seen"]}}))
    ui.add_results(client, results)
    assert folders == [run_dir]
    experiment = client.get_experiment_by_name("a")
    notes = [
        run.data.tags[publish.NOTE]
        for run in client.search_runs([experiment.experiment_id])
        if run.data.tags[RUN_TAG] == publish.STUDY_RUN
    ]
    assert notes == ["* nano: seen"]


def test_a_damaged_run_hides_no_claims_and_a_damaged_record_no_other(
    client: MlflowClient, records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    write_run(results, "c", RUNS[0])
    (write_run(results, "d", RUNS[1]) / "manifest.json").write_text("{")
    write_claims(results / "studies" / "c", "c")
    (records / "a" / "manifests.jsonl").write_text("{")
    add_records(client, records, ui.add_results(client, results))
    whole = [RUNS[0], publish.STUDY_RUN]
    assert held(client) == {"b": whole, "c": whole}
    damaged = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]
    assert damaged == [str(results / RUNS[1] / "manifest.json"), str(records / "a" / MANIFESTS)]


def test_a_study_that_was_deleted_in_mlflow_stays_so(client: MlflowClient, records: Path) -> None:
    add_records(client, records)
    experiment = client.get_experiment_by_name("a")
    client.delete_experiment(experiment.experiment_id)
    write_claims(records / "a", "a").write_text(json.dumps({"study": "a", "claims": [], "x": 1}))
    add_records(client, records)
    assert list(held(client)) == ["b"]


def started(monkeypatch: pytest.MonkeyPatch, records: Path) -> list[list[str]]:
    """The commands of reader and server, which the program starts for these records."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", commands.append)
    monkeypatch.setattr(os, "execv", lambda _, command: commands.append(command))
    monkeypatch.setattr(ui, "RECORDS", records)
    monkeypatch.setattr(sys, "argv", ["", "ui", "--port", port, "--study", str(STUDY_FILE)])
    monkeypatch.setattr(os, "environ", dict(os.environ))  # in which the program sets some
    main()
    return commands


def test_the_store_in_which_runs_are_tracked_is_shown_at_once_and_filled_meanwhile(
    client: MlflowClient,
    empty_store: Path,
    records: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (records / "a").rename(records / "default")
    write_run(tmp_path / "results", "own", RUNS[0])
    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'own.db')}"
    monkeypatch.setenv(STORE_VARIABLE, uri)
    reader, server = started(monkeypatch, records)
    assert server[server.index("--backend-store-uri") + 1] == uri
    assert server[server.index("--host") + 1] == "127.0.0.1"
    lines = capsys.readouterr().out.splitlines()
    addresses = [line.partition(":")[0] for line in lines if "://mlflow.localhost:" in line]
    assert addresses == ["default", "own"]  # not yet b's, whose record nobody asked for
    assert held(MlflowClient(uri)) == {"default": [], "own": []}
    assert is_allowed_host_header(get_allowed_hosts_from_env(), "mlflow.localhost:5000")
    own_page, trusted = "http://mlflow.localhost:5000", get_allowed_origins_from_env()
    assert not should_block_cors_request(own_page, "POST", trusted)
    monkeypatch.setattr(sys, "argv", reader[2:])
    main()
    assert held(MlflowClient(uri))["own"] == [RUNS[0]]
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [line for line in lines if "/#/experiments/" in line]  # below MLflow's


def test_a_study_without_run_and_record_is_refused(
    client: MlflowClient, records: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"STUDY=c: no run in .* name one of a, b$"):
        ui.shown_studies(client, tmp_path / "results", records / "c")


def test_of_a_records_run_some_steps_are_shown_and_its_last(
    client: MlflowClient, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path / "a", "a", RUNS[0])
    write_steps(run_dir, 101)
    pack(tmp_path / "a", tmp_path / "records" / "a")
    run_id = publish.rebuild_run(tmp_path / "records" / "a" / RUNS[0])
    steps = [point.step for point in client.get_metric_history(run_id, "k3")]
    assert steps == list(range(2, 102, 3))


@pytest.mark.parametrize("uri", ["http://127.0.0.1:5000", "postgresql://x/y", "databricks"])
def test_a_store_with_a_server_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    monkeypatch.setenv(STORE_VARIABLE, uri)
    with pytest.raises(ValueError, match=f"{STORE_VARIABLE}={uri}: make ui shows a file"):
        started(monkeypatch, tmp_path)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "5000.0", "http", "", "1 2"])
def test_what_is_no_port_is_refused(port: str) -> None:
    expected = f"^PORT={port}: no port; name one from 1 to 65535$"
    with pytest.raises(ValueError, match=expected), ui.reserved_port(port):
        pass


def test_make_ui_refuses_a_port_in_use_and_reads_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options = ("--no-print-directory", "-f", ROOT / "Makefile", "-o", ".venv/.installed-base")
        python = f"BIN={Path(sys.executable).parent}"
        done = programs.run(["make", *options, python, "ui", f"PORT={port}"], cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and list(tmp_path.iterdir()) == []
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("make: ")]
    assert line == f"error: PORT={port}: Address already in use; name another port"


def test_rays_dashboard_binds_to_loopback_and_no_recipe_changes_that() -> None:
    ray = pytest.importorskip("ray", reason="needs requirements/engines.txt")
    assert inspect.signature(ray.init).parameters["dashboard_host"].default == "127.0.0.1"
    for file in (ROOT / "experiments" / "recipes").rglob("*.yaml"):
        assert "dashboard_host" not in str(yaml.safe_load(file.read_text())), file
