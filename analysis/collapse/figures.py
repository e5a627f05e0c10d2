"""The figures of a study of collapses, one module each."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from matplotlib.figure import Figure

from analysis.collapse import answers, behaviour, causes, costs, curves, differences, outcomes
from analysis.collapse.data import GridData
from analysis.collapse.grid import NOQAT, QAT, show_rate
from analysis.drift import order
from analysis.figure_files import DRIFT, KINDS
from analysis.style import arm_style
from experiments.runs.drift import read_drift


class GridFigure(NamedTuple):
    """How a figure is drawn, and what it shows.

    Attributes:
        reads: what it needs of every run besides its manifest: metrics or drift.
    """

    draw: Callable[[GridData], Figure]
    caption: str
    reads: tuple[str, ...] = ("metrics",)


def drift_runs(data: GridData) -> order.Runs:
    """The drift without QAT and with it, dense model, at the highest rate.

    Raises:
        ValueError: neither arm has all its runs, or one has no drift.
    """
    settings = [data.design.plain(arm, data.lrs[-1]) for arm in (NOQAT, QAT)]
    complete = [setting for setting in settings if setting in data.runs]
    if not complete:
        rate = show_rate(data.lrs[-1])
        raise ValueError(
            f"{data.results}: no arm of {data.design.dense} at {rate} has all its runs; run the "
            "study"
        )
    return {
        arm_style(setting.arm).label: [
            read_drift(data.results / run.id) for run in data.runs[setting]
        ]
        for setting in complete
    }


def draw_drift(data: GridData) -> Figure:
    """When the NVFP4 codes of each layer and kind of weight have moved, by arm, at one rate."""
    rate = show_rate(data.lrs[-1])
    return order.draw({f"{data.design.dense}, learning rate {rate}": drift_runs(data)})


FIGURES: Mapping[str, GridFigure] = {
    "curves": GridFigure(curves.draw, curves.CAPTION),
    "reward": GridFigure(differences.draw, differences.CAPTION),
    "survival": GridFigure(outcomes.draw_survival, outcomes.SURVIVAL_CAPTION),
    "corrections": GridFigure(outcomes.draw_times, outcomes.TIMES_CAPTION),
    "answers": GridFigure(answers.draw, answers.CAPTION, ("metrics", "evals")),
    "behaviour": GridFigure(behaviour.draw, behaviour.CAPTION),
    "costs": GridFigure(costs.draw, costs.CAPTION),
    "causes": GridFigure(causes.draw, causes.CAPTION),
    DRIFT: GridFigure(draw_drift, order.CAPTION, ("drift",)),
}
assert tuple(FIGURES) == (*KINDS["collapse"].figures, DRIFT)
