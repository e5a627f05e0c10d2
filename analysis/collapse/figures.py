"""Figures of a study of collapses: `python -m analysis.collapse.figures --study FILE ...`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from matplotlib.figure import Figure

from analysis.collapse import answers, behaviour, causes, costs, curves, differences, outcomes
from analysis.collapse.data import GridData
from analysis.collapse.grid import NOQAT, QAT, show_rate
from analysis.drift import order
from analysis.figure_files import DRIFT, PROGRAMS, figure_names, load_judged_by, parse_drawing
from analysis.style import arm_style, save_figure
from experiments.runs.drift import read_drift
from experiments.support.cli import run_cli


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
assert tuple(FIGURES) == (*PROGRAMS["collapse"].figures, DRIFT)


def main() -> None:
    """Writes each figure."""
    arguments = parse_drawing()
    data = GridData(load_judged_by("collapse", arguments.study), arguments.results)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in figure_names(data.study):
        save_figure(partial(FIGURES[name].draw, data), arguments.out / f"{name}.{arguments.format}")


if __name__ == "__main__":
    run_cli(main)
