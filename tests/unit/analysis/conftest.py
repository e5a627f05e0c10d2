from pathlib import Path

import pytest
import yaml

from analysis.load import load_results
from analysis.results import Results
from experiments.study.load import load_study
from experiments.study.schema import STUDIES, Study
from tests.unit.analysis.synthetic_results import write_results


@pytest.fixture(scope="session")
def study_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default study with the five seeds of the protocol, and the drift of weights watched."""
    default = yaml.safe_load((STUDIES / "default.yaml").read_text())
    rl = default["rl"] | {"steps": 30, "drift_every": 10}
    default |= {"seeds": [0, 1, 2, 3, 4], "rl": rl}
    path = tmp_path_factory.mktemp("study") / "study.yaml"
    path.write_text(yaml.safe_dump(default))
    return path


@pytest.fixture(scope="session")
def study(study_file: Path) -> Study:
    return load_study(study_file)


@pytest.fixture
def results_dir(study: Study, tmp_path: Path) -> Path:
    write_results(study, tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def results(study: Study, results_dir: Path) -> Results:
    return load_results(study, results_dir)
