"""A grid in parts: complete cells that the results lack are kept from the record so far."""

import shutil
from pathlib import Path

import pytest

from analysis.record import record_study
from experiments.runs.metrics import METRICS, RECORDED_METRICS, read_csv, write_metrics
from experiments.study.load import load_study
from experiments.study.schema import ROOT, Run
from experiments.support.json_files import read_json, write_json

WHOLE = ROOT / "experiments" / "records" / "collapse-smollm2-confirm"
FILE = WHOLE / "study.yaml"
STUDY = load_study(FILE)
FIRST, SECOND = STUDY.cells


def of_cell(name: str) -> list[Run]:
    return [run for run in STUDY.runs if run.cell == name]


def recorded(record: Path) -> set[str]:
    return {path.parent.name for path in record.glob("*/manifest.json")}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Results of the second cell alone."""
    for run in of_cell(SECOND):
        folder = tmp_path / "results" / run.id
        folder.mkdir(parents=True)
        for name in ("manifest.json", "eval.json"):
            shutil.copy(WHOLE / run.id / name, folder)
        write_metrics(folder / METRICS, read_csv(WHOLE / run.id / RECORDED_METRICS, ""))
    return tmp_path / "results"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A record of the first cell alone."""
    record = tmp_path / "records" / WHOLE.name
    for run in of_cell(FIRST):
        shutil.copytree(WHOLE / run.id, record / run.id)
    for name in ("study.yaml", "claims.json"):
        shutil.copy(WHOLE / name, record)
    return record.parent


def test_a_cell_that_the_results_lack_is_kept_and_judged(results: Path, records: Path) -> None:
    record = record_study(FILE, results, records)
    assert recorded(record) == {run.id for run in STUDY.runs}
    assert not (record / "replications").exists()
    assert read_json(record / "claims.json") == read_json(WHOLE / "claims.json")
    for run in of_cell(FIRST):
        for path in (WHOLE / run.id).iterdir():
            assert (record / run.id / path.name).read_bytes() == path.read_bytes()


def test_runs_in_the_form_of_a_record_complete_a_cell(results: Path, records: Path) -> None:
    for run in of_cell(SECOND)[:2]:
        shutil.rmtree(results / run.id)
        shutil.copytree(WHOLE / run.id, results / run.id)
    record = record_study(FILE, results, records)
    assert read_json(record / "claims.json") == read_json(WHOLE / "claims.json")
    for run in STUDY.runs:
        for path in (WHOLE / run.id).iterdir():
            assert (record / run.id / path.name).read_bytes() == path.read_bytes()


def test_a_cell_of_other_settings_is_not_kept(
    results: Path, records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = of_cell(FIRST)
    path = records / WHOLE.name / first[0].id / "manifest.json"
    manifest = read_json(path)
    rl = manifest["config"]["rl"] | {"lr": 1.0}
    write_json(path, manifest | {"config": manifest["config"] | {"rl": rl}})
    record = record_study(FILE, results, records)
    assert recorded(record) == {run.id for run in of_cell(SECOND)}
    said = capsys.readouterr().out
    assert "none of its cells is kept: " in said and f"{len(first)} runs of {FIRST} are no " in said


def test_a_run_that_is_replaced_replaces_the_record(results: Path, records: Path) -> None:
    for run in of_cell(SECOND):
        shutil.copytree(WHOLE / run.id, records / WHOLE.name / run.id)
        path = results / run.id / "manifest.json"
        write_json(path, read_json(path) | {"started_at": "2026-11-26T10:00:00+00:00"})
    record = record_study(FILE, results, records)
    assert recorded(record) == {run.id for run in of_cell(SECOND)}
    assert len(list((record / "replications").iterdir())) == 1


def test_a_kept_cell_of_other_bases_is_refused(results: Path, records: Path) -> None:
    run = of_cell(SECOND)[0]
    path = results / run.id / "manifest.json"
    manifest = read_json(path)
    write_json(path, manifest | {"digests": manifest["digests"] | {"base": "another"}})
    with pytest.raises(ValueError, match=f"{run.id}.* start from different base checkpoints"):
        record_study(FILE, results, records)
    assert not (records / WHOLE.name / of_cell(SECOND)[0].id).exists()
