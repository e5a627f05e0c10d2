"""MLflow's store: where it is, how it is opened by many processes, and what is in it."""

import os

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

SQLITE = "sqlite:///"
DEFAULT_STORE = f"{SQLITE}mlflow.db"


def store_uri() -> str:
    """Where the runs are tracked: MLFLOW_TRACKING_URI, or mlflow.db in the working folder."""
    return os.environ.get("MLFLOW_TRACKING_URI", DEFAULT_STORE)


def connect() -> MlflowClient:
    """A client of the store, which is made where there is none.

    Processes take turns, as two that make an SQLite store at once corrupt it for good. No rule of
    Snakemake makes it beforehand: were it an input of the runs, losing it would train them again.
    """
    uri = store_uri()
    if not uri.startswith(SQLITE):
        return MlflowClient(uri)
    with FileLock(f"{uri.removeprefix(SQLITE)}.lock"):
        client = MlflowClient(uri)
        client.search_experiments(max_results=1)  # makes the tables
    return client


def find_or_create_experiment(client: MlflowClient, name: str) -> str:
    """Id of the MLflow experiment of a study, whichever process makes it first."""
    try:
        return str(client.create_experiment(name))
    except MlflowException:
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise
        return str(experiment.experiment_id)


def find_runs(client: MlflowClient, experiment_id: str, name: str) -> list[str]:
    """Ids of the runs of that name, newest first."""
    runs = client.search_runs([experiment_id], f"attributes.run_name = '{name}'")
    return [run.info.run_id for run in runs]
