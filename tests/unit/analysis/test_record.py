"""A record: made whole or not at all, of a grid in parts too. Two that are committed are whole, and
their collapses are counted again."""

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import yaml

from analysis.claims import judge
from analysis.claims_table import ClaimsTable, read_table
from analysis.record import (
    portable,
    record_study,
    recorded_run,
    require_commit,
    require_one_base_a_seed,
)
from experiments.runs.attempts import list_run_dirs
from experiments.runs.manifest import RunManifest
from experiments.runs.record import EVALUATIONS, MANIFESTS, METRICS, write_record
from experiments.runs.settings import read_run
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES, Run, Study
from experiments.support.json_files import read_json, write_json
from tests.files import contents
from tests.records import (
    change_manifest,
    make_manifest,
    pack,
    recorded_manifest,
    recorded_metrics,
    set_manifests,
    unpack,
)

COMMITTED = {"commit": "abc", "dirty": False, "diff_sha256": "d"}


@pytest.mark.parametrize(
    ("git", "message"),
    [
        (COMMITTED | {"dirty": True}, "trained by changes that no commit holds"),
        (COMMITTED | {"commit": None}, "trained by code that no commit holds"),
        (None, "trained by code that no commit holds"),
    ],
    ids=["dirty", "no-commit", "no-checkout"],
)
def test_runs_of_uncommitted_code_are_refused(git: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ValueError, match=rf"run/manifest.json: git: {message}; commit and"):
        require_commit(make_manifest(git=git), Path("run"))


def run_from(base: str, arm: str, seed: int) -> RunManifest:
    run = f"nano_{arm}.cell_seed{seed}"
    named = {"run": run, "arm": arm, "cell": "cell", "seed": seed, "seeds": {"run": seed}}
    return make_manifest(**named, digests={"base": base})


def test_a_cell_has_one_base_a_seed() -> None:
    bf16, qat = "bf16", "nvfp4-qat"
    whole = [run_from("x", bf16, 0), run_from("x", qat, 0), run_from("y", bf16, 1)]
    require_one_base_a_seed("cell", [*whole, run_from("y", qat, 1)])
    names = "cell cell: nano_bf16.cell_seed1 and nano_nvfp4-qat.cell_seed1 start from different"
    with pytest.raises(ValueError, match=names):
        require_one_base_a_seed("cell", [*whole, run_from("z", qat, 1)])


def test_a_recorded_command_names_no_folder_of_a_machine() -> None:
    command = "/a/python3 -m experiments.launch.run --study s/x.yaml --log '/b c/train.log'"
    shown = "python3 -m experiments.launch.run --study s/x.yaml --log train.log"
    assert portable(command) == shown and portable(shown) == shown


def test_recorded_claims_are_of_the_recorded_runs(
    study: Study, study_file: Path, results_dir: Path, tmp_path: Path
) -> None:
    stale = results_dir / "studies" / study.study
    judge(study.model_copy(update={"seeds": (0, 1)}), results_dir).write(stale)
    record = record_study(study_file, results_dir, tmp_path)
    recorded = read_table(record / "claims.json")
    assert recorded == judge(study, record) != read_table(stale / "claims.json")


def test_a_record_is_not_replaced_by_a_study_of_other_models(
    study_file: Path, results_dir: Path, record: Path
) -> None:
    before = contents(record.parent)
    renamed = yaml.safe_load((record / "study.yaml").read_text())
    renamed["models"] = {f"other-{name}": it for name, it in renamed["models"].items()}
    (record / "study.yaml").write_text(yaml.safe_dump(renamed))
    with pytest.raises(ValueError, match="the record of another study, with other models"):
        record_study(study_file, results_dir, record.parent)
    assert contents(record.parent).keys() == before.keys()


@pytest.mark.parametrize("file", ["manifest.json", "metrics.jsonl", "eval.json", "drift.jsonl"])
def test_a_source_that_cannot_be_read_leaves_the_old_record_as_it_is(
    study: Study, study_file: Path, results_dir: Path, record: Path, file: str
) -> None:
    before = contents(record.parent)
    damaged = results_dir / study.runs[-1].id / file
    damaged.write_text("{")
    with pytest.raises(ValueError, match=re.escape(str(damaged))):
        record_study(study_file, results_dir, record.parent)
    assert contents(record.parent) == before


def test_a_disk_that_fills_up_leaves_the_old_record_as_it_is(
    study_file: Path, results_dir: Path, record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(record.parent)
    monkeypatch.setattr(ClaimsTable, "write", Mock(side_effect=OSError("full")))
    with pytest.raises(OSError, match="full"):
        record_study(study_file, results_dir, record.parent)
    assert contents(record.parent) == before


def test_what_a_kill_left_is_put_right(
    study: Study, study_file: Path, results_dir: Path, record: Path
) -> None:
    before = contents(record.parent)
    record.rename(record.with_name(".default.former"))
    record.with_name(".default.partial").mkdir()
    damaged = results_dir / study.runs[0].id / "metrics.jsonl"
    whole = damaged.read_text()
    damaged.write_text("{")
    with pytest.raises(ValueError, match=re.escape(str(damaged))):
        record_study(study_file, results_dir, record.parent)
    assert contents(record.parent) == before
    damaged.write_text(whole)
    record_study(study_file, results_dir, record.parent)
    assert [path.name for path in record.parent.iterdir()] == ["default"]


def test_records_of_one_day_keep_each_others_outcomes(
    study_file: Path, results_dir: Path, record: Path
) -> None:
    for hour in ("08", "12"):
        set_manifests(results_dir, started_at=f"2027-01-01T{hour}:00:00+00:00")
        record_study(study_file, results_dir, record.parent)
    kept = {path.name for path in (record / "replications").iterdir()}
    assert kept == {f"recorded-2027-01-01T{hour}-00-00.json" for hour in ("00", "08")}


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
    set_manifests(results, started_at="2026-11-26T10:00:00+00:00")
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


class Record(NamedTuple):
    """What the tests know of a recorded study, on purpose not from its file."""

    name: str
    file: str
    dense: str
    steps: int
    seeds: range
    num_runs: int

    @property
    def folder(self) -> Path:
        return ROOT / "experiments" / "records" / self.name

    @property
    def study(self) -> Study:
        return load_study(self.folder / "study.yaml")


GRID = Record("collapse", "collapse.yaml", "small-dense", 200, range(5), 95)
CONFIRM = Record(
    "collapse-confirm", "collapse_confirm.yaml", "small-dense-confirm", 240, range(10, 20), 50
)
BOTH = pytest.mark.parametrize("record", [GRID, CONFIRM], ids=["grid", "confirmation"])
Times = list[tuple[int, bool]]  # step, and whether the run collapsed at it


def times(record: Record, arm: str, cell: str, model: str = "") -> Times:
    """Steps of the collapses straight from the files, by loops."""
    found = []
    for seed in record.seeds:
        run = f"{model or record.dense}_{arm}.{cell}_seed{seed}"
        reward = recorded_metrics(record.folder / run)["critic/score/mean"].tolist()
        assert len(reward) == record.steps
        best, time = 0.0, (record.steps, False)
        for step in range(20, record.steps + 1):
            smooth = sum(reward[step - 20 : step]) / 20
            best = max(best, smooth)
            if smooth < best / 2:
                time = (step, True)
                break
        found.append(time)
    return found


@BOTH
def test_runs_are_whole_of_committed_code_and_one_base_a_seed_and_cell(record: Record) -> None:
    study, by_cell = record.study, dict[str, list[Path]]()
    for run in study.runs:
        by_cell.setdefault(run.cell or "", []).append(record.folder / run.id)
    assert sum(map(len, by_cell.values())) == record.num_runs
    for cell, folders in by_cell.items():
        runs = [study.find_run(folder.name) for folder in folders]
        manifests = [read_run(study, run, record.folder, "record again") for run in runs]
        require_one_base_a_seed(cell, manifests)
        for manifest, folder in zip(manifests, folders, strict=True):
            require_commit(manifest, folder)


@BOTH
def test_the_claims_file_names_the_runs_that_collapsed(record: Record) -> None:
    found = {}
    for model, arm, cell in {(run.model, run.arm, run.cell) for run in record.study.runs}:
        its = zip(record.seeds, times(record, arm, cell or "", model), strict=True)
        found |= {f"{model}_{arm}.{cell}_seed{seed}": step for seed, (step, yes) in its if yes}
    assert read_table(record.folder / "claims.json").collapsed_at == found


@BOTH
def test_the_study_file_still_describes_the_recorded_runs(record: Record) -> None:
    now, study = load_study(STUDIES / record.file), record.study
    assert [now.training_config(r) for r in now.runs] == [
        study.training_config(r) for r in study.runs
    ]
