"""One look for all figures: colours by arm, fonts, and PNG files that repeat byte for byte."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from analysis.results import Results
from experiments.study.arms import ARMS, Arm
from experiments.study.schema import Study

WIDTH_INCHES = 9.0
DOTS_PER_INCH = 160
INK = "#222222"
FAINT = "#8a8a8a"
MUTED = "#555555"
HEADER_INCHES = 0.62  # title and legend
LABEL_GAP = 0.06  # of two labels, as a fraction of the axes' height


_RC: Mapping[str, Any] = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "DejaVu Sans",  # ships with matplotlib, so it is the same on every machine
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def arm_style(arm: str) -> Arm:
    """How an arm is drawn; ValueError for an unknown one."""
    arms: dict[str, Arm] = {name: style for name, style in ARMS.items()}
    if arm not in arms:
        raise ValueError(f"arm {arm}: unknown; add it to experiments/study/arms.py")
    return arms[arm]


def new_figure(title: str, note: str, height_inches: float, **grid: Any) -> tuple[Figure, Any]:
    """A figure of README width and its 2-D array of axes, with a title above and a note below.

    Args:
        grid: as `Figure.subplots` takes them.
    """
    footer_inches = 0.1 + 0.16 * (1 + note.count("\n"))
    bottom, top = footer_inches / height_inches, 1 - HEADER_INCHES / height_inches
    layout = ConstrainedLayoutEngine(rect=(0.004, bottom, 0.992, top - bottom))
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout=layout)
    figure.text(0.01, 1 - 0.08 / height_inches, title, va="top", fontsize=12, fontweight="bold")
    figure.text(0.01, 0.06 / height_inches, note, va="bottom", fontsize=8.5, color=MUTED)
    return figure, figure.subplots(squeeze=False, **grid)


def add_legend(figure: Figure, axes: Axes) -> None:
    """The legend of one of the axes as a row below the figure's title."""
    handles, labels = axes.get_legend_handles_labels()
    below_title = (0.004, 1 - 0.3 / figure.get_size_inches()[1])
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=below_title,
        ncols=len(labels),
        columnspacing=1.6,
    )


def plot_over_seeds(axes: Axes, study: Study, results: Results, model: str, metric: str) -> None:
    """Every arm's metric by step: the mean over its seeds, and a band over their range.

    An "x" marks where an arm was stopped, at the height of its last defined value.
    """
    axes.margins(x=0.01)
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for arm in study.arms:
        style, values_ST = arm_style(arm), results.series(model, arm, metric)
        steps, low, high = results.steps(model, arm), values_ST.min(0), values_ST.max(0)
        axes.fill_between(steps, low, high, color=style.color, alpha=0.2, linewidth=0)
        mean_T = values_ST.mean(0)
        axes.plot(
            steps,
            mean_T,
            color=style.color,
            linestyle=style.dashes,
            linewidth=style.line_width,
            label=style.label,
        )
        defined = mean_T[np.isfinite(mean_T)]
        if results.was_stopped(model, arm) and len(defined):
            axes.plot(steps[-1], defined[-1], "x", color=style.color, markersize=9, mew=2.2)


def seeds_note(study: Study, results: Results) -> str:
    """What lines, bands and marks of `plot_over_seeds` show."""
    count = len(study.seeds)
    note = f"Line: mean of {count} seeds; band: their range." if count > 1 else "One seed."
    any_stopped = any(results.was_stopped(model, *study.arms) for model in study.models)
    return f"{note} x: ended by the KL gate." if any_stopped else note


def spread_labels(axes: Axes, labels: Mapping[str, float]) -> dict[str, float]:
    """Heights for labels at the right edge in axes fractions: near their data, never overlapping.

    Args:
        labels: data value of each label; what is infinite stands at the top.
    """
    to_fraction = axes.transData + axes.transAxes.inverted()
    wanted = {name: min(1.0, to_fraction.transform((1, y))[1]) for name, y in labels.items()}
    heights: dict[str, float] = {}
    floor = 0.0
    for name in sorted(wanted, key=wanted.__getitem__):
        heights[name] = max(wanted[name], floor)
        floor = heights[name] + LABEL_GAP
    return heights


def save_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Draws in the common style and writes a PNG without date or version in it."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_RC}):
        draw().savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
