from pathlib import Path

import pytest
from synthetic_results import write_results

from analysis.load import Results, load_results
from experiments.schema import ROOT, Study, load_study


@pytest.fixture(scope="session")
def study() -> Study:
    return load_study(ROOT / "experiments" / "study.yaml")


@pytest.fixture
def results_dir(study: Study, tmp_path: Path) -> Path:
    write_results(study, tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def results(study: Study, results_dir: Path) -> Results:
    return load_results(results_dir, [run.id for run in study.runs])
