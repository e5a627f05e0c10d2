import pickle
import shutil
from pathlib import Path

import pytest

from analysis.load import load_results
from analysis.record import record_study
from analysis.results import Results
from experiments.study.load import load_study
from experiments.study.schema import Study
from tests.study_files import write_study
from tests.unit.analysis.synthetic_results import write_results


@pytest.fixture(scope="session")
def study_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default study with the five seeds of the protocol, and the drift of weights watched."""
    changes = {"study": "default", "seeds": [0, 1, 2, 3, 4], "rl/steps": 30, "rl/drift_every": 10}
    return write_study(tmp_path_factory.mktemp("study"), changes)


@pytest.fixture(scope="session")
def study(study_file: Path) -> Study:
    return load_study(study_file)


@pytest.fixture(scope="session")
def written(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results that stay as they are: tests get copies."""
    folder = tmp_path_factory.mktemp("written") / "results"
    write_results(study, folder)
    return folder


@pytest.fixture(scope="session")
def pickled(study: Study, written: Path) -> bytes:
    return pickle.dumps(load_results(study, written))


@pytest.fixture
def results_dir(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "results")


@pytest.fixture
def results(pickled: bytes) -> Results:
    """Each test's own, down to the lists in the frames, which a copy of a frame would share."""
    return pickle.loads(pickled)


@pytest.fixture
def record(study_file: Path, results_dir: Path, tmp_path: Path) -> Path:
    """The record of the study, judged."""
    return record_study(study_file, results_dir, tmp_path / "records")
