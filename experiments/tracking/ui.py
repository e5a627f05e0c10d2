"""Shows the runs of this machine, and the record of a study, in MLflow.

Prints an address for each study of this machine and the one that is asked for, then becomes
MLflow's server, while a process reads what the store lacks from files. What is lacking is asked of
the store itself: the next start reads what one that was interrupted has not, and what has changed.
A study's record is read where no run of it is among the results; its runs go once there is one.
"""

import argparse
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import ViewType

from experiments.runs.attempts import list_attempts, list_run_dirs, read_history
from experiments.runs.manifest import RunManifest, read_manifest
from experiments.runs.metrics import Row
from experiments.runs.provenance import digest_file, digest_json
from experiments.study.load import load_study
from experiments.study.schema import ROOT
from experiments.tracking.glance import SHARED_VIEW, save_view, view_address
from experiments.tracking.live import STATUS
from experiments.tracking.publish import (
    CLAIMS_TAG,
    EVALUATIONS_TAG,
    STUDY_RUN,
    evaluations_digest,
    is_whole,
    publish_study,
    rebuild_run,
)
from experiments.tracking.rebuild import rebuild
from experiments.tracking.store import (
    RUN_TAG,
    SQLITE,
    STORE_VARIABLE,
    connect,
    explained_errors,
    find_or_create_experiment,
    search_runs,
    store_uri,
)

HOST, LARGEST_PORT = "127.0.0.1", 65535
# a name of the same machine that every current browser knows; at an address that begins localhost
# or 127.0.0.1 MLflow covers a fresh browser's columns by its assistant
NAME = "mlflow.localhost"
SETTINGS = {  # which MLflow takes from the environment, and a user may have set
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # seven processes, to judge answers of agents
    "MLFLOW_SERVER_ALLOWED_HOSTS": f"{NAME}:*,localhost:*,{HOST}:*",
    "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": f"http://{NAME}:*",
}
RESULTS, RECORDS = Path("results"), ROOT / "experiments" / "records"
RECORD_TAG = "record_sha256"  # of an experiment: of the record's files, once all of it is read
MOST_RUNS = 50_000  # that MLflow lists at once


def add_results(client: MlflowClient, results: Path) -> set[str]:
    """Adds runs and judged studies that the store lacks or holds in part; returns the studies."""
    deleted = _deleted_studies(client)
    found, changed = defaultdict[str, set[str]](set), set[str]()
    for run_dir in list_run_dirs(results):
        with _named_errors():
            manifest, rows = read_history(run_dir)
            found[manifest.study].add(manifest.run)
            if manifest.study not in deleted and not _shows_run(client, manifest, rows, run_dir):
                rebuild_run(run_dir)
                changed.add(manifest.study)
    for claims in sorted(results.glob("studies/*/claims.json")):
        study = claims.parent.name
        if study in found:
            found[study].add(STUDY_RUN)
        is_shown = study not in changed and _shows_claims(client, study, claims)
        if study not in deleted and not is_shown:
            with _named_errors():
                publish_study(claims.parent, results)
    for study in found.keys() - deleted:
        _remove_record(client, study, found[study])
    return set(found)


def add_record(client: MlflowClient, record: Path, but: set[str]) -> None:
    """Adds a study's record that the store lacks, holds in part or of another state."""
    study, claims = record.name, record / "claims.json"
    if study in but | _deleted_studies(client) or not claims.is_file():
        return
    files = {str(it.relative_to(record)): it for it in record.rglob("*") if it.is_file()}
    digest = digest_json({name: digest_file(it) for name, it in files.items()})
    experiment = client.get_experiment_by_name(study)
    if experiment is not None and experiment.tags.get(RECORD_TAG) == digest:
        return
    with _named_errors():
        rebuild(record)
        experiment_id = find_or_create_experiment(client, study)
        client.set_experiment_tag(experiment_id, RECORD_TAG, digest)


def shown_studies(client: MlflowClient, results: Path, record: Path) -> dict[str, str]:
    """The address's end of every study that is there or will be, made where the store lacks it."""
    names = {it.name for it in client.search_experiments() if SHARED_VIEW in it.tags}
    for run_dir in list_run_dirs(results):
        with suppress(ValueError):  # who reads the run says so
            attempts = list_attempts(run_dir)
            names.add(read_manifest(attempts[-1].folder if attempts else run_dir, "").study)
    if (record / "claims.json").is_file():
        names.add(record.name)
    if record.name not in names:
        recorded = sorted(path.parent.name for path in record.parent.glob("*/claims.json"))
        raise ValueError(
            f"STUDY={record.name}: no run in {results} and no record; run it with make run, or "
            f"name one of {', '.join(recorded)}"
        )
    found = {}
    for name in sorted(names - _deleted_studies(client)):
        found[name] = find_or_create_experiment(client, name)
        save_view(client, found[name])
    return found


@contextmanager
def reserved_port(port: str) -> Iterator[int]:
    """Holds a port of this machine for the block, so that no other server takes it meanwhile."""
    if not port.isdecimal() or not 1 <= int(port) <= LARGEST_PORT:
        raise ValueError(f"PORT={port}: no port; name one from 1 to {LARGEST_PORT}")
    try:
        server = socket.create_server((HOST, int(port)))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ValueError(f"PORT={port}: {reason}; name another port") from None
    with server:
        yield int(port)


def require_file() -> None:
    """ValueError unless the store is a file: any other has a server of its own."""
    if not store_uri().startswith(SQLITE):
        raise ValueError(
            f"{STORE_VARIABLE}={store_uri()}: make ui shows a file ({SQLITE}); open that store "
            f"in its own server, or unset {STORE_VARIABLE} to browse mlflow.db"
        )


def server_command(port: int) -> list[str]:
    """MLflow's own server for the store, on this machine alone; a worker takes seconds to start."""
    mlflow = str(Path(sys.executable).parent / "mlflow")
    address = ("--host", HOST, "--port", str(port))
    return [mlflow, "ui", *address, "--workers", "1", "--backend-store-uri", store_uri()]


def _shows_run(
    client: MlflowClient, manifest: RunManifest, rows: Sequence[Row], run_dir: Path
) -> bool:
    """Whether the store holds this very run; one that is being read is RUNNING there."""
    experiment = client.get_experiment_by_name(manifest.study)
    held = search_runs(client, experiment.experiment_id, manifest.run) if experiment else []
    if not held or held[0].data.tags.get(EVALUATIONS_TAG) != evaluations_digest(run_dir):
        return False
    return is_whole(client, held[0], manifest, rows)


def _shows_claims(client: MlflowClient, study: str, claims: Path) -> bool:
    """Whether the runs of the study and of all its arms are there, and whole."""
    experiment, digest = client.get_experiment_by_name(study), digest_file(claims)
    held = search_runs(client, experiment.experiment_id, STUDY_RUN) if experiment else []
    shown = [
        (it.info.status, it.data.tags.get(CLAIMS_TAG)) == (STATUS["finished"], digest)
        for it in held
    ]
    return bool(shown) and all(shown)


def _remove_record(client: MlflowClient, study: str, but: set[str]) -> None:
    """Deletes the runs of a study's record that no run of this machine has replaced."""
    experiment = client.get_experiment_by_name(study)
    if experiment is None or not experiment.tags.get(RECORD_TAG):
        return
    for run in client.search_runs([experiment.experiment_id], max_results=MOST_RUNS):
        if run.data.tags.get(RUN_TAG) not in but:
            client.delete_run(run.info.run_id)
    client.set_experiment_tag(experiment.experiment_id, RECORD_TAG, "")


def _deleted_studies(client: MlflowClient) -> set[str]:
    """Those deleted in MLflow, which makes no others of their names."""
    return {it.name for it in client.search_experiments(ViewType.DELETED_ONLY)}


@contextmanager
def _named_errors() -> Iterator[None]:
    """What cannot be read is left out."""
    try:
        yield
    except ValueError as error:
        print(f"not read: {error}", file=sys.stderr, flush=True)


def _read(study: Path, addresses: str) -> None:
    record = RECORDS / load_study(study).study
    with explained_errors():
        client = connect()
        add_record(client, record, add_results(client, RESULTS))
    print(f"All runs of this machine and of {record.name} are read.\n{addresses}", flush=True)


def main(args: argparse.Namespace) -> None:
    """Prints the addresses and becomes the server; with --read fills the store instead."""
    require_file()
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    if args.read is not None:
        _read(args.study, args.read)
        return
    with reserved_port(args.port) as port, explained_errors():
        record = RECORDS / load_study(args.study).study
        studies = shown_studies(connect(), RESULTS, record)
    root = f"http://{NAME}:{port}"
    addresses = "\n".join(f"{name}: {view_address(root, it)}" for name, it in studies.items())
    print(f"{addresses}\n(the runs in {store_uri()}; Ctrl-C ends it; STUDY=name adds a record)")
    print(f"(a browser that finds no {NAME}: {HOST}; close MLflow's assistant there)", flush=True)
    read = [sys.executable, "-m", "experiments.tracking", "ui", "--study", str(args.study)]
    subprocess.Popen([*read, f"--read={addresses}"])  # which MLflow's own lines follow
    for variable, value in SETTINGS.items():
        os.environ.setdefault(variable, value)
    command = server_command(port)
    os.execv(command[0], command)
