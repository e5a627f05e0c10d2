"""Studies of collapses: the recorded ones drawn; one without cells judged, drawn and recorded,
stopped runs too.

Runs of the record `collapse-vllm`, which has the same arms and steps, stand in for those of verl
in the study without cells.
"""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.claims_table import read_table
from analysis.collapse import causes, curves, outcomes
from analysis.collapse.data import GridData
from analysis.collapse.judge import judge_study
from analysis.collapse.outcome_table import outcome_table
from analysis.figure_files import figure_names
from analysis.figures import GRID_FIGURES, costs
from analysis.record import record_study, recorded_run
from analysis.tables.collapses import collapses_text
from experiments.runs.attempts import list_run_dirs
from experiments.runs.record import write_record
from experiments.runs.settings import complete_cells
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES, Run, Study
from tests.files import set_keys
from tests.records import recorded_evaluations, unpack
from tests.study_files import REMOVED, write_study
from tests.unit.analysis.synthetic_results import stop, write_results

FILE = STUDIES / "collapse_verl.yaml"
STUDY = load_study(FILE)
STOPPED_AT = 200  # of the run without QAT, whose stand-in lives to the end


def finish(run: Run, results: Path, *, stopped: bool) -> None:
    stand_in = f"small-dense-vllm_{run.arm}.lr2e-4_seed{run.seed}"
    source, folder = ROOT / "experiments" / "records" / "collapse-vllm" / stand_in, results / run.id
    shutil.rmtree(folder, ignore_errors=True)
    unpack(source, results).rename(folder)
    (folder / "eval.json").unlink()
    named = {"run": run.id, "study": STUDY.study, "model": run.model, "cell": None}
    settings = {"config": STUDY.training_config(run), "reason": None}
    set_keys(folder / "manifest.json", **named, **settings)
    if stopped:
        stop(results, run, STOPPED_AT)


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
        assert GRID_FIGURES[name](data).axes


@pytest.mark.parametrize("read", [judge_study, outcome_table, GridData, complete_cells])
def test_runs_of_other_settings_are_refused(
    results: Path, read: Callable[[Study, Path], object]
) -> None:
    changed = STUDY.model_copy(update={"rl": STUDY.rl.model_copy(update={"lr": 1e-5})})
    refused = rf"{STUDY.runs[0].id}/manifest.json: config.rl.lr: 0.0002, and in study {STUDY.study}"
    with pytest.raises(ValueError, match=refused):
        read(changed, results)


RIVAL = ROOT / "experiments" / "records" / "collapse-confirm"
THREE_RATES = ROOT / "experiments" / "records" / "collapse"
ON_REWARD = ROOT / "experiments" / "records" / "collapse-cpu-confirm"


@cache
def recorded() -> GridData:
    return GridData(load_study(RIVAL / "study.yaml"), RIVAL)


def texts_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_answers_show_those_before_training_too() -> None:
    figure = outcomes.draw_answers(recorded())
    for axes, precision in zip(figure.axes[:2], ("bf16", "nvfp4"), strict=True):
        before = [
            it["accuracy"]
            for run in list_run_dirs(RIVAL)
            for it in recorded_evaluations(run)
            if (it["step"], it["precision"], it["decoding"]) == (0, precision, "sampled")
        ]
        dotted = [line for line in axes.get_lines() if line.get_linestyle() == ":"]
        assert [line.get_xdata()[0] for line in dotted] == pytest.approx([np.mean(before)])


def test_rates_that_have_not_been_run_get_no_panels(tmp_path: Path) -> None:
    study = load_study(THREE_RATES / "study.yaml")
    for run in study.runs:
        if run.cell in ("dense-lr1e-4", "dense-lr2e-4"):
            unpack(THREE_RATES / run.id, tmp_path)
    data = GridData(study, tmp_path)
    assert (data.lrs, data.design.lrs) == ((1e-4, 2e-4), (1e-4, 2e-4, 3e-4))
    titles = [axes.get_title() for axes in curves.draw(data).axes]
    assert [title.split("\n")[1] for title in filter(None, titles)] == [
        *(f"1e-4: {count} of 5 collapsed" for count in (0, 0, 0)),
        *(f"2e-4: {count} of 5 collapsed" for count in (0, 4, 0)),
    ]
    ticks = outcomes.draw_survival(data).axes[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["1e-4", "2e-4"]
    assert len(outcomes.draw_times(data).axes[0].get_yticklabels()) == 3


def test_causes_show_whole_scales() -> None:
    for panel, quantity in zip(causes.draw(recorded()).axes, causes.QUANTITIES, strict=True):
        low, high = panel.get_ylim()
        if quantity.is_log:
            assert (np.log10([low, high]) % 1).tolist() == [0, 0]
        else:
            assert low == 0 < high


def test_differences_of_reward_are_those_of_the_claims() -> None:
    data = GridData(load_study(ON_REWARD / "study.yaml"), ON_REWARD)
    rows, figure = outcomes.rows_of(data), outcomes.draw_reward(data)
    assert [row.claim for row in rows] == ["C9", "C4"], "of what the study has"
    claims = {it.name: it for it in read_table(ON_REWARD / "claims.json").claims}
    numbers = [text for text in texts_of(figure) if " to " in text and text.endswith(")")]
    assert len(numbers) == len(rows)
    for row, number in zip(rows, numbers, strict=True):
        claim = claims[row.claim]
        ends = (claim.estimate, claim.low, claim.high)
        assert number == "{:+.3f} ({:+.3f} to {:+.3f})".format(*ends)
    bars = [it for it in figure.axes[0].patches if isinstance(it, Rectangle)]
    assert np.allclose([bar.get_x() + bar.get_width() for bar in bars], [-0.05, 0.05])


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("collapse_exact", "| not run | 0 of 5, exact 0 of 5 | not run | not run | C12 "),
        ("collapse_exact_bf16", "| not run | not run | 0 of 5, exact 0 of 5 | not run | C13 "),
    ],
)
def test_exact_arms_are_drawn_and_counted(name: str, row: str, tmp_path: Path) -> None:
    file = write_study(tmp_path, {"seeds": [*range(5)], "protocol": REMOVED}, name)
    study, results = load_study(file), tmp_path / "results"
    write_results(study, results)
    record_study(file, results, tmp_path / "records")
    assert row in collapses_text(tmp_path / "records")
    data = GridData(study, results)
    shown = {it: texts_of(GRID_FIGURES[it](data)) for it in figure_names(study)}
    assert shown["curves"].count("0 at every step") == 1
    assert ("reward" in shown) == ("nvfp4-qat" in study.arms)
    assert [it.claim for it in outcomes.rows_of(data)] == ["C14"] * ("reward" in shown)


@pytest.mark.parametrize(
    ("folder", "parts"), [(RIVAL, ["whole step"]), (ON_REWARD, ["rollout", "update", "other"])]
)
def test_costs_show_the_parts_that_are_recorded(folder: Path, parts: list[str]) -> None:
    data = GridData(load_study(folder / "study.yaml"), folder)
    figure = costs.draw_both(data)
    shown = texts_of(figure)
    assert all(shown.count(part) == 1 for part in parts)
    assert ("rollout" in shown) == ("rollout" in parts)
    steps_ST = data.series(curves.at_highest_rate(data)[0], "timing_s/step")
    assert f"{np.median(steps_ST[:, 1:], axis=1).mean():.2f} s" in shown
    assert sum(text.endswith("%") for text in shown) == len(figure.axes[1].patches) - 1, "but BF16"


def test_a_recorded_cell_that_is_gone_is_named_and_its_claims_open(tmp_path: Path) -> None:
    study = load_study(THREE_RATES / "study.yaml")
    kept = [run for run in study.runs if run.cell != "moe-lr3e-4"]
    write_record(tmp_path, {run.id: recorded_run(THREE_RATES / run.id) for run in kept})
    table = judge_study(study, tmp_path)
    assert table.marks["small-dense"][0] == "cells not complete, not judged: moe-lr3e-4"
    assert [it.name for it in table.claims if it.verdict == "NOT RUN"] == ["C6"]
