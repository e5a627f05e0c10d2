"""A grid in parts: complete cells that the results lack are kept from the record so far."""

import shutil
from pathlib import Path

import pytest

from analysis.record import record_study, recorded_run
from experiments.runs.attempts import list_run_dirs
from experiments.runs.record import EVALUATIONS, MANIFESTS, METRICS, write_record
from experiments.study.load import load_study
from experiments.study.schema import ROOT, Run
from experiments.support.json_files import read_json, write_json
from tests.records import change_manifest, pack, recorded_manifest, unpack

WHOLE = ROOT / "experiments" / "records" / "collapse-smollm2-confirm"
FILE = WHOLE / "study.yaml"
STUDY = load_study(FILE)
FIRST, SECOND = STUDY.cells
FILES = (MANIFESTS, METRICS, EVALUATIONS)


def of_cell(name: str) -> list[Run]:
    return [run for run in STUDY.runs if run.cell == name]


def recorded(record: Path) -> set[str]:
    return {run.name for run in list_run_dirs(record)}


def is_as_recorded(record: Path) -> bool:
    return all((record / name).read_bytes() == (WHOLE / name).read_bytes() for name in FILES)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Results of the second cell alone."""
    for run in of_cell(SECOND):
        unpack(WHOLE / run.id, tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A record of the first cell alone."""
    record = tmp_path / "records" / WHOLE.name
    write_record(record, {run.id: recorded_run(WHOLE / run.id) for run in of_cell(FIRST)})
    for name in ("study.yaml", "claims.json"):
        shutil.copy(WHOLE / name, record)
    return record.parent


def test_a_cell_that_the_results_lack_is_kept_and_judged(results: Path, records: Path) -> None:
    record = record_study(FILE, results, records)
    assert recorded(record) == {run.id for run in STUDY.runs}
    assert not (record / "replications").exists()
    assert read_json(record / "claims.json") == read_json(WHOLE / "claims.json")
    assert is_as_recorded(record)


def test_a_cell_of_other_settings_is_not_kept(
    results: Path, records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = of_cell(FIRST)
    run_dir = records / WHOLE.name / first[0].id
    config = recorded_manifest(run_dir)["config"]
    change_manifest(run_dir, config=config | {"rl": config["rl"] | {"lr": 1.0}})
    record = record_study(FILE, results, records)
    assert recorded(record) == {run.id for run in of_cell(SECOND)}
    said = capsys.readouterr().out
    assert "none of its cells is kept: " in said and f"{len(first)} runs of {FIRST} are no " in said


def test_a_run_that_is_replaced_replaces_the_record(results: Path, records: Path) -> None:
    pack(WHOLE, records / WHOLE.name)
    for run in of_cell(SECOND):
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
    assert recorded(records / WHOLE.name) == {run.id for run in of_cell(FIRST)}
