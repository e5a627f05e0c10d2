"""Figure: offline accuracy before and after training, every arm in both precisions."""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.results import Results
from analysis.stats import Interval, mean_over_prompts, seeded_generator
from analysis.style import FAINT, add_legend, arm_style, new_figure
from experiments.study.schema import Study

CAPTION = "Offline accuracy of the base model and of every arm, evaluated in BF16 and in NVFP4"
NEUTRAL = "#444444"
DECODINGS = ("greedy", "sampled")
PRECISIONS = {"bf16": ("evaluated in BF16", "o", -0.13), "nvfp4": ("evaluated in NVFP4", "D", 0.13)}


class Column(NamedTuple):
    """One place on the horizontal axis: an arm after its last evaluated step, or the base model."""

    arm: str
    step: int
    label: str
    color: str


def draw(study: Study, results: Results) -> Figure:
    """A column a model, a row a decoding; a pair of points an arm."""
    figure, axes = new_figure(
        "Offline accuracy on held-out prompts",
        "Points: mean over seeds and prompts; bars: 95 % bootstrap interval over both. "
        "Dashed: base model in BF16.",
        height_inches=5.2,
        nrows=len(DECODINGS),
        ncols=len(study.models),
        sharex="col",
        sharey=True,
    )
    for row, decoding in zip(axes, DECODINGS, strict=True):
        row[0].set_ylabel(f"accuracy, {decoding}")
        for panel, model in zip(row, study.models, strict=True):
            _draw_panel(panel, study, results, model, decoding)
    for panel, model in zip(axes[0], study.models, strict=True):
        panel.set_title(model)
    add_legend(figure, axes[0][0])
    return figure


def _draw_panel(panel: Axes, study: Study, results: Results, model: str, decoding: str) -> None:
    columns = _columns(study, results, model)
    for precision, (label, marker, shift) in PRECISIONS.items():
        for position, column in enumerate(columns):
            rates_SP = results.success_rates(model, column.arm, column.step, precision, decoding)
            interval = mean_over_prompts(rates_SP, seeded_generator())
            fill = _fill(column.color, precision == "bf16")
            _draw_point(panel, position + shift, interval, marker, column.color, fill)
            if column.step == 0 and precision == "bf16":
                panel.axhline(interval.estimate, color=FAINT, linestyle="--", linewidth=1)
        fill = _fill(NEUTRAL, precision == "bf16")
        panel.plot([], [], marker, color=NEUTRAL, markerfacecolor=fill, label=label)
    panel.set_xticks(range(len(columns)), [column.label for column in columns])
    panel.tick_params(axis="x", labelsize=8.5)
    panel.grid(axis="x", visible=False)


def _columns(study: Study, results: Results, model: str) -> list[Column]:
    # all arms start from the same base model: any one's first evaluation is of it
    columns = [Column(study.arms[0], 0, "base\nmodel", NEUTRAL)]
    for arm in study.arms:
        style, step = arm_style(arm), results.last_evaluated(model, arm)
        label = style.label.replace(", ", ",\n")
        if step < study.rl.steps:
            label += f"\n(step {step} of {study.rl.steps})"
        columns.append(Column(arm, step, label, style.color))
    return columns


def _draw_point(
    panel: Axes, x: float, interval: Interval, marker: str, color: str, fill: str
) -> None:
    below, above = interval.estimate - interval.low, interval.high - interval.estimate
    panel.errorbar(
        x,
        interval.estimate,
        yerr=[[below], [above]],
        fmt=marker,
        color=color,
        markerfacecolor=fill,
        markersize=6,
        capsize=2.5,
    )


def _fill(color: str, filled: bool) -> str:
    return color if filled else "white"
