"""A study of collapses without cells, one seed: judged, drawn and recorded, stopped runs too.

Runs of the record `collapse-vllm`, which has the same arms and steps, stand in for verl's.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.collapse import curves
from analysis.collapse.data import GridData
from analysis.collapse.judge import judge_study
from analysis.collapse.outcome_table import outcome_table
from analysis.figure_files import figure_names
from analysis.figures import GRID_FIGURES
from analysis.record import record_study
from experiments.runs.completeness import complete_cells
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES, Run, Study
from tests.records import unpack

FILE = STUDIES / "collapse_verl.yaml"
STUDY = load_study(FILE)
STOPPED_AT = 200  # of the run without QAT, whose stand-in lives to the end


def finish(run: Run, results: Path, *, stopped: bool) -> None:
    stand_in = f"small-dense-vllm_{run.arm}.lr2e-4_seed{run.seed}"
    source, folder = ROOT / "experiments" / "records" / "collapse-vllm" / stand_in, results / run.id
    shutil.rmtree(folder, ignore_errors=True)
    unpack(source, results).rename(folder)
    (folder / "eval.json").unlink()
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    named = {"run": run.id, "study": STUDY.study, "model": run.model, "cell": None}
    reason = f"stopped: by its file stop, at step {STOPPED_AT}" if stopped else None
    content |= named | {"config": STUDY.training_config(run), "reason": reason}
    (folder / "manifest.json").write_text(json.dumps(content))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:STOPPED_AT] if stopped else lines))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for run in STUDY.runs:
        finish(run, tmp_path, stopped=run.arm == "nvfp4-noqat")
    return tmp_path


def test_it_is_one_cell_and_not_judged_before_its_last_run(tmp_path: Path) -> None:
    *first, last = STUDY.runs
    for run in first:
        finish(run, tmp_path, stopped=False)
    assert complete_cells(STUDY, tmp_path) == {}
    with pytest.raises(ValueError, match="not all of study collapse-verl is complete"):
        record_study(FILE, tmp_path, tmp_path / "records")
    finish(last, tmp_path, stopped=False)
    assert complete_cells(STUDY, tmp_path) == {None: STUDY.runs}


def test_one_seed_is_told_and_decides_nothing(results: Path) -> None:
    table = judge_study(STUDY, results)
    (claim,) = table.claims
    assert (claim.verdict, claim.name) == ("REPORTED", "at 2e-4")
    collapsed = ", ".join(f"{arm} 0 of 1" for arm in ("nvfp4-noqat", "nvfp4-qat", "bf16"))
    assert claim.detail == f"collapsed: {collapsed}"
    assert "1 of 3 runs stopped before their last step" in table.marks["small-dense-verl"]


def test_a_stopped_run_counts_up_to_its_last_step(results: Path) -> None:
    (noqat, *_) = (
        its[0] for setting, its in GridData(STUDY, results).grid.items() if "noqat" in setting.arm
    )
    assert (noqat.collapsed, noqat.num_steps) == (None, STOPPED_AT)
    assert "Mean reward" in outcome_table(STUDY, results)


def test_of_several_seeds_stopped_runs_are_not_judged(tmp_path: Path) -> None:
    study = STUDY.model_copy(update={"seeds": (20, 21, 22)})
    for run in study.runs:
        finish(run, tmp_path, stopped=False)
    (whole,) = judge_study(study, tmp_path).claims
    assert whole.verdict == "REPORTED"
    finish(study.runs[0], tmp_path, stopped=True)
    (claim,) = judge_study(study, tmp_path).claims
    assert (claim.verdict, claim.detail.partition(":")[0]) == (
        "NOT RUN",
        "not all runs are at their last step",
    )
    with pytest.raises(ValueError, match="no cell of study collapse-verl has all its runs at"):
        GridData(study, tmp_path)


def test_its_figures_are_drawn(results: Path) -> None:
    data = GridData(STUDY, results)
    lines = [len(axes.lines) for axes in curves.draw(data).axes]
    assert lines == [1] * 6, "of each arm one run, its reward and its mismatch"
    for name in figure_names(STUDY):
        assert GRID_FIGURES[name].draw(data).axes


@pytest.mark.parametrize("read", [judge_study, outcome_table, GridData, complete_cells])
def test_runs_of_other_settings_are_refused(
    results: Path, read: Callable[[Study, Path], object]
) -> None:
    changed = STUDY.model_copy(update={"rl": STUDY.rl.model_copy(update={"lr": 1e-5})})
    refused = rf"{STUDY.runs[0].id}/manifest.json: config.rl.lr: 0.0002, and in study {STUDY.study}"
    with pytest.raises(ValueError, match=refused):
        read(changed, results)
