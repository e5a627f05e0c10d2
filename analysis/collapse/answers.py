"""Figure `answers`: what the last checkpoints answer, evaluated in both precisions."""

from collections.abc import Mapping
from itertools import chain
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.collapse.data import GridData, show_arm, style_of
from analysis.collapse.grid import show_rate
from analysis.collapse.outcome_table import base_accuracies, last_accuracies, read_evaluated
from analysis.collapse.outcomes import heights_in_row, settings_at
from analysis.style import FAINT, INK, ArmStyle, new_figure, write_beside
from experiments.runs.evaluation import Precision

CAPTION = "Offline accuracy of the last checkpoints, by arm and correction, in BF16 and in NVFP4"
PANELS: Mapping[Precision, str] = {"bf16": "evaluated in BF16", "nvfp4": "evaluated in NVFP4"}


def draw(data: GridData) -> Figure:
    """All settings of the dense model at the highest rate: a mark a seed, a line at the mean."""
    lr = data.lrs[-1]
    shown = settings_at(data, lr)
    evaluated = [read_evaluated(data.study, data.results, data.runs[it]) for it in shown]
    figure, axes = new_figure(
        f"Offline accuracy after training at {show_rate(lr)}, {data.design.dense}",
        "Share of held-out problems that the last checkpoint answers, sampled: a mark a seed, line "
        "and number: their mean.\nDotted: the mean before training, where it was evaluated. A row "
        "has fewer marks where runs were not evaluated.",
        height_inches=1.5 + 0.42 * len(shown),
        has_legend=False,
        ncols=len(PANELS),
        sharey=True,
    )
    for panel, (precision, title) in zip(axes[0], PANELS.items(), strict=True):
        for y, setting in enumerate(shown):
            _draw_row(panel, last_accuracies(evaluated[y], precision), y, style_of(setting))
            panel.axhline(y + 0.5, color=FAINT, linewidth=0.5)
        if before := base_accuracies(chain.from_iterable(evaluated), precision):
            panel.axvline(fmean(before), color=FAINT, linestyle=":", linewidth=1.4)
        panel.grid(axis="y", visible=False)
        panel.set_yticks(range(len(shown)), [show_arm(setting) for setting in shown])
        panel.set(
            title=title,
            xlabel="accuracy (share)",
            xlim=(-0.02, 1.02),
            ylim=(len(shown) - 0.5, -0.5),
        )
    return figure


def _draw_row(panel: Axes, accuracies: list[float], y: int, style: ArmStyle) -> None:
    if not accuracies:
        write_beside(panel, "-", y)
        return
    mean = fmean(accuracies)
    panel.plot(
        accuracies,
        heights_in_row(y, len(accuracies)),
        style.marker,
        color=style.color,
        markersize=4.5,
        fillstyle="none",
    )
    panel.plot([mean, mean], [y - 0.4, y + 0.4], color=INK, linewidth=1.4)
    write_beside(panel, f"{mean:.2f}", y)
