"""An MLflow store for each test, in a working folder of its own."""

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An initialised MLflow store; making one takes seconds, copying one does not."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def client(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """A store of its own in the working folder."""
    monkeypatch.chdir(tmp_path)  # MLflow puts artifacts into the working folder
    return use_store(shutil.copy(empty_store, tmp_path / "mlflow.db"), monkeypatch)


def use_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """Tracks in that file from now on; named whole, because MLflow keeps stores by name."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{path}")
    return MlflowClient(f"sqlite:///{path}")
