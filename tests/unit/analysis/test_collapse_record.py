"""The recorded studies of collapses: valid, judged as recorded, recomputed independently."""

from pathlib import Path
from typing import NamedTuple

import pytest

from analysis.claims_table import read_table
from analysis.collapse.judge import judge_study
from analysis.record import recorded_run, require_commit, require_one_base_a_seed
from experiments.runs.record import write_record
from experiments.runs.settings import read_run
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES, Study
from tests.records import recorded_metrics


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


def test_a_recorded_cell_that_is_gone_is_named_and_its_claims_open(tmp_path: Path) -> None:
    kept = [run for run in GRID.study.runs if run.cell != "moe-lr3e-4"]
    write_record(tmp_path, {run.id: recorded_run(GRID.folder / run.id) for run in kept})
    table = judge_study(GRID.study, tmp_path)
    assert table.marks[GRID.dense][0] == "cells not complete, not judged: moe-lr3e-4"
    assert [it.name for it in table.claims if it.verdict == "NOT RUN"] == ["C6"]
