"""The figures of a study of collapses, of the record with the strongest rival of QAT."""

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
from analysis.figures import costs
from experiments.runs.attempts import list_run_dirs
from experiments.study.load import load_study
from experiments.study.schema import ROOT
from tests.records import recorded_evaluations, unpack

RECORD = ROOT / "experiments" / "records" / "collapse-confirm"
GRID = ROOT / "experiments" / "records" / "collapse"
ON_REWARD = ROOT / "experiments" / "records" / "collapse-cpu-confirm"


@cache
def recorded() -> GridData:
    return GridData(load_study(RECORD / "study.yaml"), RECORD)


def texts_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_answers_show_those_before_training_too() -> None:
    figure = outcomes.draw_answers(recorded())
    for axes, precision in zip(figure.axes[:2], ("bf16", "nvfp4"), strict=True):
        before = [
            it["accuracy"]
            for run in list_run_dirs(RECORD)
            for it in recorded_evaluations(run)
            if (it["step"], it["precision"], it["decoding"]) == (0, precision, "sampled")
        ]
        dotted = [line for line in axes.get_lines() if line.get_linestyle() == ":"]
        assert [line.get_xdata()[0] for line in dotted] == pytest.approx([np.mean(before)])


def test_rates_that_have_not_been_run_get_no_panels(tmp_path: Path) -> None:
    study = load_study(GRID / "study.yaml")
    for run in study.runs:
        if run.cell in ("dense-lr1e-4", "dense-lr2e-4"):
            unpack(GRID / run.id, tmp_path)
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
    ("folder", "parts"), [(RECORD, ["whole step"]), (ON_REWARD, ["rollout", "update", "other"])]
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
