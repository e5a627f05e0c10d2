"""Figures of what became of runs: `survival`, `corrections`, `reward` and `answers`."""

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.collapse.data import GridData, show_arm, style_of
from analysis.collapse.grid import (
    BF16,
    BF16_EXACT,
    CORRECTIONS,
    FFN,
    NOQAT,
    QAT,
    QAT_EXACT,
    Setting,
    num_collapsed,
    show_rate,
)
from analysis.collapse.outcome_table import base_accuracies, last_accuracies, read_evaluated
from analysis.collapse.rules import AREA_LEVEL, AREA_MARGIN
from analysis.collapse.survival import Outcome, paired_difference, share_collapsed, show_difference
from analysis.style import (
    FAINT,
    INK,
    ArmStyle,
    add_legend,
    arm_style,
    name_rows,
    new_figure,
    shade_row,
    write_beside,
)
from experiments.runs.evaluation import Precision

ARMS = (BF16, NOQAT, QAT)
EXACT_ARMS = (BF16_EXACT, QAT_EXACT)
ROW_SHARE = 0.8  # of a row's height, over which its marks spread
MAX_ROW_INCHES = 1.4  # with more seeds than fit, marks are smaller
DODGE = 0.08  # of the distance of two learning rates, between arms
EDGE = 1.25  # the panel goes on beyond the margin by this factor
PANELS: Mapping[Precision, str] = {"bf16": "evaluated in BF16", "nvfp4": "evaluated in NVFP4"}


class Difference(NamedTuple):
    """What a claim compares, and where it requires the interval to be; None: on an open side."""

    claim: str
    first: Setting
    second: Setting
    low: float | None
    high: float

    @property
    def label(self) -> str:
        """Both settings, the second without what it has in common with the first."""
        second = show_arm(self.second).removeprefix("NVFP4 ")
        return f"{self.claim}: {show_arm(self.first)}\nless {second}"


def draw_survival(data: GridData) -> Figure:
    """Share of seeds alive: at the last step by learning rate, or at one rate by step."""
    if len(data.lrs) == 1:
        return _draw_by_step(data)
    dense, lrs, steps = data.design.dense, data.lrs, data.study.rl.steps
    figure, axes = new_figure(
        f"Runs of {dense} that survive {steps} steps, by learning rate",
        f"Bars: exact 95 % intervals (Clopper-Pearson) of {len(data.study.seeds)} seeds. "
        "Arms are drawn side by side.",
        height_inches=3.4,
    )
    panel = axes[0][0]
    exact = [arm for arm in EXACT_ARMS if arm in data.study.arms]
    for position, arm in enumerate([*ARMS, *exact]):
        settings = {i: data.design.plain(arm, lr) for i, lr in enumerate(lrs)}
        shown = {i: it for i, it in settings.items() if it in data.grid}
        if not shown:  # nor in the legend
            continue
        _draw_shares(
            panel,
            arm,
            np.array(list(shown)) + DODGE * (position - 1),
            [data.grid[setting] for setting in shown.values()],
        )
    panel.set_xticks(range(len(lrs)), [show_rate(lr) for lr in lrs])
    panel.set(
        xlabel="learning rate of AdamW",
        xlim=(-0.5, len(lrs) - 0.5),
        ylabel=f"share of seeds alive\nat step {steps}",
        ylim=(-0.03, 1.03),
    )
    add_legend(figure, panel)
    return figure


def _draw_by_step(data: GridData) -> Figure:
    lr, steps = data.lrs[0], data.study.rl.steps
    figure, axes = new_figure(
        f"Runs that survive, by training step at {show_rate(lr)}, {data.design.dense}",
        f"Share of {len(data.study.seeds)} seeds that have not collapsed.",
        height_inches=3.4,
    )
    panel = axes[0][0]
    for setting in settings_at(data, lr):
        outcomes, style = data.grid[setting], style_of(setting)
        ends = sorted(it.collapsed for it in outcomes if it.collapsed is not None)
        alive = [1 - count / len(outcomes) for count in range(len(ends) + 1)]
        line = {**style.line, "label": show_arm(setting)}
        panel.step([0, *ends, steps], [*alive, alive[-1]], where="post", **line)
    panel.set(xlabel="training step", xlim=(0, steps), ylabel="share of seeds alive")
    panel.set_ylim(-0.03, 1.03)
    add_legend(figure, panel)
    return figure


def _draw_shares(
    panel: Axes, arm: str, x: np.ndarray, outcomes: Sequence[Sequence[Outcome]]
) -> None:
    style = arm_style(arm)
    shares = [share_collapsed(its) for its in outcomes]
    alive = np.array([1 - share.estimate for share in shares])
    # never None of a share, but an Interval may have ends that are
    ends = np.array([(share.low, share.high) for share in shares], dtype=float).reshape(-1, 2)
    bars = [alive - (1 - ends[:, 1]), (1 - ends[:, 0]) - alive]
    panel.errorbar(
        x,
        alive,
        yerr=np.clip(bars, 0, None),
        color=style.color,
        linestyle="none",
        label=style.label,
        marker=style.marker,
        elinewidth=1.0,
        capsize=3,
    )


def settings_at(data: GridData, lr: float) -> list[Setting]:
    """What has been run of the dense model at a rate: no QAT with corrections, then other arms."""
    noqat = data.design.plain(NOQAT, lr)
    corrected = [noqat._replace(correction=correction) for correction in CORRECTIONS]
    others = [data.design.plain(arm, lr) for arm in (FFN, QAT, QAT_EXACT, BF16, BF16_EXACT)]
    return [setting for setting in (noqat, *corrected, *others) if setting in data.grid]


def draw_times(data: GridData) -> Figure:
    """When each run collapsed at the highest rate: arms, and no QAT with corrections."""
    dense, lr, steps = data.design.dense, data.lrs[-1], data.study.rl.steps
    shown = settings_at(data, lr)
    num_seeds = len(data.study.seeds)
    row_inches = min(0.16 + 0.065 * num_seeds, MAX_ROW_INCHES)
    mark_points = min(4.5, 1.5 * 72 * row_inches * ROW_SHARE / num_seeds)
    figure, axes = new_figure(
        f"Step of the collapse at learning rate {show_rate(lr)}, {dense}",
        f"Filled: a run that collapsed. Open: alive at step {steps}. Height within a row: the "
        "seed, in one order in all rows.",
        height_inches=1.4 + row_inches * len(shown),
        has_legend=False,
    )
    panel = axes[0][0]
    for y, setting in enumerate(shown):
        _draw_row(panel, data.grid[setting], y, style_of(setting), mark_points)
        panel.axhline(y + 0.5, color=FAINT, linewidth=0.5)
    write_beside(panel, "collapsed", -0.7)
    panel.grid(axis="y", visible=False)
    name_rows(panel, [show_arm(setting) for setting in shown])
    panel.set(xlabel="training step of the collapse", xlim=(0, 1.02 * steps))
    return figure


def heights_in_row(y: int, num_marks: int) -> np.ndarray:
    """Where a row's marks go, (num_marks,), one below the other."""
    return y + ROW_SHARE * ((np.arange(num_marks) + 0.5) / num_marks - 0.5)


def _draw_row(
    panel: Axes, outcomes: Sequence[Outcome], y: int, style: ArmStyle, mark_points: float
) -> None:
    for outcome, height in zip(outcomes, heights_in_row(y, len(outcomes)), strict=True):
        end = outcome.collapsed or outcome.num_steps
        fill = "none" if outcome.collapsed is None else "full"
        panel.plot(end, height, style.marker, color=style.color, fillstyle=fill, ms=mark_points)
    write_beside(panel, f"{num_collapsed(outcomes)} of {len(outcomes)}", y)


def rows_of(data: GridData) -> list[Difference]:
    """The rows whose runs are complete, at the highest rate."""
    noqat, qat, bf16 = (data.design.plain(arm, data.lrs[-1]) for arm in (NOQAT, QAT, BF16))
    tis = noqat._replace(correction="token_tis")
    rows = [
        Difference("C9", noqat, qat, None, -AREA_MARGIN),
        Difference("C10", tis, qat, None, -AREA_MARGIN),
        Difference("C4", qat, bf16, -AREA_MARGIN, AREA_MARGIN),
        Difference("C14", qat._replace(arm=QAT_EXACT), qat, -AREA_MARGIN, AREA_MARGIN),
    ]
    return [row for row in rows if {row.first, row.second} <= data.grid.keys()]


def draw_reward(data: GridData) -> Figure:
    """A row a comparison: a mark a seed, their mean with its interval."""
    rows = rows_of(data)
    figure, axes = new_figure(
        f"Mean reward of {data.study.rl.steps} steps at {show_rate(data.lrs[-1])}, "
        f"{data.design.dense}",
        f"Small: seeds. Large: their mean, with its {100 * AREA_LEVEL:g} % interval, also in "
        "numbers. Shaded: where the claim asks the whole interval to be.",
        height_inches=1.35 + 0.62 * len(rows),
        has_legend=False,
    )
    panel = axes[0][0]
    panel.axvline(0, color=FAINT, linewidth=1)
    for y, row in enumerate(rows):
        _draw_difference(panel, data, row, y)
    left, right = panel.get_xlim()
    left, right = min(left, -EDGE * AREA_MARGIN), max(right, EDGE * AREA_MARGIN)
    for y, row in enumerate(rows):
        low = left if row.low is None else row.low
        shade_row(panel, y, low, row.high)
    name_rows(panel, [row.label for row in rows])
    panel.set(xlabel="difference of mean reward", xlim=(left, right))
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="y", visible=False)
    return figure


def _draw_difference(panel: Axes, data: GridData, row: Difference, y: int) -> None:
    first, second = ([run.area for run in data.grid[it]] for it in (row.first, row.second))
    interval, style = paired_difference(first, second, AREA_LEVEL), style_of(row.first)
    seeds_S = np.subtract(first, second)
    heights = heights_in_row(y, len(seeds_S))
    panel.plot(seeds_S, heights, style.marker, color=style.color, markersize=4, fillstyle="none")
    assert interval.low is not None and interval.high is not None
    panel.hlines(y, interval.low, interval.high, color=INK, linewidth=1.6)
    panel.plot(interval.estimate, y, style.marker, color=style.color, mec=INK, markersize=8)
    write_beside(panel, show_difference(interval), y)


def draw_answers(data: GridData) -> Figure:
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
            _draw_accuracies(panel, last_accuracies(evaluated[y], precision), y, style_of(setting))
            panel.axhline(y + 0.5, color=FAINT, linewidth=0.5)
        if before := base_accuracies(chain.from_iterable(evaluated), precision):
            panel.axvline(fmean(before), color=FAINT, linestyle=":", linewidth=1.4)
        panel.grid(axis="y", visible=False)
        name_rows(panel, [show_arm(setting) for setting in shown])
        panel.set(title=title, xlabel="accuracy (share)", xlim=(-0.02, 1.02))
    return figure


def _draw_accuracies(panel: Axes, accuracies: list[float], y: int, style: ArmStyle) -> None:
    if not accuracies:
        write_beside(panel, "-", y)
        return
    mean, heights = fmean(accuracies), heights_in_row(y, len(accuracies))
    panel.plot(accuracies, heights, style.marker, color=style.color, ms=4.5, fillstyle="none")
    panel.plot([mean, mean], [y - 0.4, y + 0.4], color=INK, linewidth=1.4)
    write_beside(panel, f"{mean:.2f}", y)
