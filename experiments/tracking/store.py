"""MLflow's store: where it is, how it is opened by many processes, and what is in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import mlflow.store.tracking.sqlalchemy_store  # noqa: F401  # else each fork of a job imports it
from filelock import FileLock, Timeout
from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Run
from mlflow.exceptions import MlflowException
from requests import RequestException
from sqlalchemy.exc import SQLAlchemyError

# a server that does not answer costs a run some seconds and one warning, not MLflow's minutes
REQUEST_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
# the last where a store needs a driver that is not installed
STORE_ERRORS = (MlflowException, SQLAlchemyError, RequestException, Timeout, ImportError)
LOCK_TIMEOUT_S = 120.0  # processes that take turns need some seconds each
SQLITE = "sqlite:///"
REASON_CHARS = 200
RUN_TAG = "run"  # its run id; the name in MLflow is shorter
STORE_VARIABLE = "MLFLOW_TRACKING_URI"
DEFAULT_STORE = f"{SQLITE}mlflow.db"


def store_uri() -> str:
    """Where the runs are tracked: MLFLOW_TRACKING_URI, or mlflow.db in the working folder."""
    return os.environ.get(STORE_VARIABLE) or DEFAULT_STORE


def connect() -> MlflowClient:
    """A client of the store, which is made where there is none.

    Processes take turns, as two that make an SQLite store at once corrupt it for good. No rule of
    Snakemake makes it beforehand: were it an input of the runs, losing it would train them again.
    """
    limit_requests()
    uri = store_uri()
    if not uri.startswith(SQLITE):
        return MlflowClient(uri)
    with FileLock(f"{uri.removeprefix(SQLITE)}.lock", timeout=LOCK_TIMEOUT_S):
        client = MlflowClient(uri)
        client.search_experiments(max_results=1)  # makes the tables
    return client


def limit_requests() -> None:
    """Has MLflow give up soon, unless the user set limits."""
    for name, value in REQUEST_LIMITS.items():
        os.environ.setdefault(name, value)


@contextmanager
def explained_errors() -> Iterator[None]:
    """Any error of the store becomes a ValueError with its address and what to do."""
    try:
        yield
    except STORE_ERRORS as error:
        uri = store_uri()
        hint = "move the file away" if uri.startswith(SQLITE) else "start the server"
        hint = "install its driver" if isinstance(error, ImportError) else hint
        reason = " ".join(str(error).split())[:REASON_CHARS]
        raise ValueError(
            f"{uri}: not usable as an MLflow store ({reason}); {hint} and try again: the view is "
            "made from files"
        ) from error


def find_or_create_experiment(client: MlflowClient, name: str) -> str:
    """Id of the MLflow experiment of a study, whichever process makes it first.

    MLflow keeps a deleted experiment, takes no runs for it and no other of its name: a study that
    has new results restores its own, and says so.
    """
    try:
        return str(client.create_experiment(name))
    except MlflowException:
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise
    experiment_id = str(experiment.experiment_id)
    if experiment.lifecycle_stage == LifecycleStage.DELETED:
        try:
            client.restore_experiment(experiment_id)
            print(f"MLflow: experiment {name} had been deleted: restored", flush=True)
        except MlflowException as error:
            # unless another run of the study was faster
            if client.get_experiment(experiment_id).lifecycle_stage == LifecycleStage.DELETED:
                raise ValueError(
                    f"{store_uri()}: experiment {name} is deleted and cannot be restored "
                    f"({error}); delete it for good, or give the study another name"
                ) from error
    return experiment_id


def find_runs(client: MlflowClient, experiment_id: str, run_id: str) -> list[str]:
    """MLflow's ids of the runs that a run id, or "study", has there, newest first."""
    return [run.info.run_id for run in search_runs(client, experiment_id, run_id)]


def search_runs(client: MlflowClient, experiment_id: str, run_id: str) -> list[Run]:
    """The same as MLflow's runs."""
    return list(client.search_runs([experiment_id], f"tags.{RUN_TAG} = '{run_id}'"))
