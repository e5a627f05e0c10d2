"""Figures `survival` and `corrections`: which runs collapsed, and when."""

from collections.abc import Sequence

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
from analysis.collapse.survival import Outcome, share_collapsed
from analysis.style import FAINT, ArmStyle, add_legend, arm_style, new_figure, write_beside

SURVIVAL_CAPTION = "Share of seeds without a collapse, by learning rate or, at one rate, by step"
TIMES_CAPTION = "Step at which each run collapsed, by arm and correction, at the highest rate"
ARMS = (BF16, NOQAT, QAT)
EXACT_ARMS = (BF16_EXACT, QAT_EXACT)
ROW_SHARE = 0.8  # of a row's height, over which its marks spread
MAX_ROW_INCHES = 1.4  # with more seeds than fit, marks are smaller
DODGE = 0.08  # of the distance of two learning rates, between arms


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
        panel.step(
            [0, *ends, steps],
            [*alive, alive[-1]],
            where="post",
            color=style.color,
            linestyle=style.dashes,
            label=show_arm(setting),
        )
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
    panel.set_yticks(range(len(shown)), [show_arm(setting) for setting in shown])
    panel.set(
        xlabel="training step of the collapse",
        xlim=(0, 1.02 * steps),
        ylim=(len(shown) - 0.5, -0.5),
    )
    return figure


def heights_in_row(y: int, num_marks: int) -> np.ndarray:
    """Where a row's marks go, (num_marks,), one below the other."""
    return y + ROW_SHARE * ((np.arange(num_marks) + 0.5) / num_marks - 0.5)


def _draw_row(
    panel: Axes, outcomes: Sequence[Outcome], y: int, style: ArmStyle, mark_points: float
) -> None:
    for outcome, height in zip(outcomes, heights_in_row(y, len(outcomes)), strict=True):
        panel.plot(
            outcome.collapsed or outcome.num_steps,
            height,
            style.marker,
            color=style.color,
            fillstyle="none" if outcome.collapsed is None else "full",
            markersize=mark_points,
        )
    write_beside(panel, f"{num_collapsed(outcomes)} of {len(outcomes)}", y)
