"""One look for all figures: arms by colour, line and marker; files that repeat byte by byte."""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from analysis.results import Array, Results
from experiments.study.schema import Study

WIDTH_INCHES = 9.0
DOTS_PER_INCH = 130
INK = "#222222"
FAINT = "#8a8a8a"
MUTED = "#555555"
SHADE = "#e9e4d4"
TITLE_INCHES, LEGEND_INCHES = 0.36, 0.26
# the end of a run, which no arm's marker looks like
STAR: Mapping[str, Any] = {
    "marker": "*",
    "markersize": 11,
    "markeredgecolor": "white",
    "markeredgewidth": 0.8,
    "linestyle": "none",
    "zorder": 4,
}

# neither date nor version, so that files repeat
NO_METADATA: Mapping[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
}

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
    "svg.hashsalt": "nvfp4-qat-rl",  # ids of an SVG are random without
}


class ArmStyle(NamedTuple):
    """How an arm is drawn; arms differ by more than colour."""

    label: str
    color: str
    dashes: str | tuple[int, tuple[float, ...]]  # as matplotlib takes it
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        """How matplotlib draws its lines."""
        return {"color": self.color, "linestyle": self.dashes}


# colours after Okabe and Ito 2008, for any colour vision
ARM_STYLES: Mapping[str, ArmStyle] = {
    "bf16": ArmStyle("BF16", "#8a8a8a", "solid", "o"),
    "nvfp4-noqat": ArmStyle("NVFP4, no QAT", "#d55e00", (0, (1, 1)), "X"),
    "nvfp4-qat": ArmStyle("NVFP4 QAT", "#0072b2", "solid", "s"),
    "nvfp4-qat-ffn": ArmStyle("NVFP4 QAT, FFN only", "#009e73", (0, (4, 1.5)), "^"),
    "bf16-exact": ArmStyle("BF16, exact", "#3c3c3c", (0, (4, 1.5)), "D"),
    "nvfp4-qat-exact": ArmStyle("NVFP4 QAT, exact", "#56b4e9", (0, (4, 1.5)), "v"),
}


# without QAT, told apart from that arm where the mismatch is corrected
CORRECTED = ArmStyle("NVFP4, no QAT, corrected", "#cc79a7", (0, (6, 1.5, 1, 1.5)), "P")


def arm_style(arm: str) -> ArmStyle:
    """How an arm is drawn; ValueError for an unknown one."""
    if arm not in ARM_STYLES:
        raise ValueError(f"arm {arm}: unknown; add it to analysis/style.py")
    return ARM_STYLES[arm]


def new_figure(
    title: str, note: str, height_inches: float, has_legend: bool = True, **grid: Any
) -> tuple[Figure, Any]:
    """A figure of README width and its 2-D array of axes, with a title above and a note below."""
    footer_inches = 0.1 + 0.16 * (1 + note.count("\n"))
    header_inches = TITLE_INCHES + (LEGEND_INCHES if has_legend else 0)
    bottom, top = footer_inches / height_inches, 1 - header_inches / height_inches
    layout = ConstrainedLayoutEngine(rect=(0.004, bottom, 0.992, top - bottom))
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout=layout)
    figure.text(0.01, 1 - 0.08 / height_inches, title, va="top", fontsize=12, fontweight="bold")
    figure.text(0.01, 0.06 / height_inches, note, va="bottom", fontsize=8.5, color=MUTED)
    return figure, figure.subplots(squeeze=False, **grid)


def grid_by_model(
    study: Study,
    title: str,
    note: str,
    height_inches: float,
    row_labels: Sequence[str],
    sharey: bool | Literal["row"],
) -> tuple[Figure, Any]:
    """As `new_figure`: a row of panels a label, a column a model, training steps to the right."""
    figure, axes = new_figure(
        title,
        note,
        height_inches,
        nrows=len(row_labels),
        ncols=len(study.models),
        sharex="col",
        sharey=sharey,
    )
    for row, label in zip(axes, row_labels, strict=True):
        row[0].set_ylabel(label)
    for panel, model in zip(axes[0], study.models, strict=True):
        panel.set_title(model)
    for panel in axes[-1]:
        panel.set_xlabel("training step")
    return figure, axes


def add_legend(figure: Figure, *axes: Axes) -> None:
    """The legend of some axes as a row below the figure's title."""
    named = [it for panel in axes for it in zip(*panel.get_legend_handles_labels(), strict=True)]
    handles, labels = zip(*named, strict=True)
    below_title = (0.004, 1 - 0.3 / figure.get_size_inches()[1])
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=below_title,
        ncols=len(labels),
        columnspacing=1.6,
    )


def write_beside(panel: Axes, text: str, height: float) -> None:
    """Right of the panel, at a height of its data."""
    panel.annotate(
        text,
        xy=(1.0, height),
        xycoords=("axes fraction", "data"),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=INK,
    )


def write_at(panel: Axes, text: str, x: float, y: float, points: float = 6) -> None:
    """Right of a place in the panel, so many points away from it."""
    panel.annotate(text, (x, y), xytext=(points, 0), textcoords="offset points", va="center")


def name_rows(panel: Axes, labels: Sequence[str]) -> None:
    """Rows at 0, 1 and so on, from above."""
    panel.set_yticks(range(len(labels)), labels)
    panel.set_ylim(len(labels) - 0.5, -0.5)


def shade_row(panel: Axes, y: float, low: float, high: float) -> None:
    """From low to high, behind a row of height 1."""
    panel.barh(y, high - low, left=low, height=0.9, color=SHADE, linewidth=0, zorder=0)


def plot_seeds(
    axes: Axes, study: Study, results: Results, model: str, arm: str, metric: str, **line: Any
) -> Array:
    """A line a seed of an arm's metric by step; returns the values (seeds, steps).

    A star marks where the arm was stopped, at the height of its last defined value.
    """
    style, steps_T = arm_style(arm), results.steps(model, arm)
    values_ST = results.series(model, arm, metric)
    for values_T in values_ST:
        axes.plot(steps_T, values_T, **style.line, **line)
        defined = np.flatnonzero(np.isfinite(values_T))
        if results.was_stopped(model, arm) and len(defined):
            axes.plot(steps_T[-1], values_T[defined[-1]], color=style.color, **STAR)
    axes.margins(x=0.01, y=0.08)  # markers stand out beyond their values
    axes.set_xlim(right=study.rl.steps + 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return values_ST


def seeds_note(study: Study, results: Results) -> str:
    """What lines and stars of `plot_seeds` show."""
    note = "Each line is one seed." if len(study.seeds) > 1 else "One seed."
    any_stopped = any(results.was_stopped(model, *study.arms) for model in study.models)
    return f"{note} Star: ended by the KL gate." if any_stopped else note


def _fix_layout(figure: Figure) -> None:
    """Lays the figure out for good, at rounded positions.

    The solver's last bits differ from run to run, and with them an SVG's bytes.
    """
    engine = figure.get_layout_engine()
    assert engine is not None, "of new_figure"
    engine.execute(figure)
    with matplotlib.rc_context({"figure.constrained_layout.use": False}):
        figure.set_layout_engine(None)  # "none" would have it drawn once more before it is saved
    for axes in figure.axes:
        locate = axes.get_axes_locator()
        if locate is not None:  # of a colour bar, as drawing does it
            axes.apply_aspect(locate(axes, None))  # type: ignore[arg-type]
        x, y, width, height = (round(value, 6) for value in axes.get_position().bounds)
        axes.set_position((x, y, width, height))


def figure_bytes(draw: Callable[[], Figure], kind: str) -> bytes:
    """A file's content in the common style; a PNG or an SVG has no date or version in it."""
    content = BytesIO()
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_RC}):
        figure = draw()
        _fix_layout(figure)
        metadata = NO_METADATA.get(kind)
        figure.savefig(content, format=kind, dpi=DOTS_PER_INCH, metadata=metadata)
    return content.getvalue()


def save_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Draws a figure into a file, whose name says the kind; ValueError for a folder."""
    if path.is_dir():
        raise ValueError(f"{path}: a folder; name a file, such as {path / 'figure.png'}")
    path.write_bytes(figure_bytes(draw, path.suffix.removeprefix(".") or "png"))
