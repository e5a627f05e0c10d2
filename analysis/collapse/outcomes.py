"""Figures `survival` and `corrections`: which runs collapsed, and when."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.collapse.data import GridData
from analysis.collapse.grid import (
    BF16,
    CORRECTIONS,
    FFN,
    NOQAT,
    QAT,
    num_collapsed,
    show_rate,
)
from analysis.collapse.survival import Outcome, share_collapsed
from analysis.style import add_legend, arm_style, new_figure

SURVIVAL_CAPTION = "Share of seeds without a collapse by learning rate, with exact intervals"
TIMES_CAPTION = "Step at which each run collapsed, by arm and correction, at the highest rate"
ARMS = (BF16, NOQAT, QAT)
DODGE = 0.08  # of the distance of two learning rates, between arms


def draw_survival(data: GridData) -> Figure:
    """Share of seeds alive at the last step by learning rate, with exact 95 % intervals."""
    dense, lrs, steps = data.design.dense, data.design.lrs, data.study.rl.steps
    figure, axes = new_figure(
        f"Runs of {dense} that survive {steps} steps, by learning rate",
        f"Bars: exact 95 % intervals (Clopper-Pearson) of {len(data.study.seeds)} seeds. "
        "Arms are drawn side by side.",
        height_inches=3.4,
    )
    panel = axes[0][0]
    for position, arm in enumerate(ARMS):
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
        linestyle=style.dashes,
        label=style.label,
        marker=style.marker,
        linewidth=1.6,
        elinewidth=1.0,
        capsize=3,
    )


def draw_times(data: GridData) -> Figure:
    """When each run collapsed at the highest rate: arms, and no QAT with corrections."""
    dense, lr, steps = data.design.dense, data.design.decisive_lr, data.study.rl.steps
    rows = {data.design.plain(NOQAT, lr): f"{arm_style(NOQAT).label}, no correction"}
    for correction, label in CORRECTIONS.items():
        corrected = data.design.plain(NOQAT, lr)._replace(correction=correction)
        rows[corrected] = f"{arm_style(NOQAT).label}, {label}"
    rows |= {data.design.plain(arm, lr): arm_style(arm).label for arm in (FFN, QAT, BF16)}
    shown = [setting for setting in rows if setting in data.grid]
    figure, axes = new_figure(
        f"Step of the collapse at learning rate {show_rate(lr)}, {dense}",
        f"Filled: a run that collapsed. Open: alive at step {steps}. Numbers: collapsed runs.",
        height_inches=1.4 + 0.36 * len(shown),
        has_legend=False,
    )
    panel = axes[0][0]
    for y, setting in enumerate(shown):
        _draw_row(panel, data.grid[setting], y, setting.arm)
    panel.set_yticks(range(len(shown)), [rows[setting] for setting in shown])
    panel.set(
        xlabel="training step of the collapse",
        xlim=(0, 1.16 * steps),
        ylim=(len(shown) - 0.5, -0.5),
    )
    return figure


def _draw_row(panel: Axes, outcomes: Sequence[Outcome], y: int, arm: str) -> None:
    style = arm_style(arm)
    dead = [it.collapsed for it in outcomes if it.collapsed is not None]
    alive = [it.num_steps for it in outcomes if it.collapsed is None]
    look: dict[str, Any] = {
        "color": style.color,
        "marker": style.marker,
        "linestyle": "none",
        "markersize": 7,
    }
    panel.plot(dead, [y] * len(dead), alpha=0.85, **look)
    spread = y + 0.32 * np.linspace(-1, 1, len(alive)) * (len(alive) > 1)
    panel.plot(alive, spread, fillstyle="none", **look)
    panel.annotate(
        f"{num_collapsed(outcomes)} of {len(outcomes)}",
        xy=(0.995, y),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="center",
        fontweight="bold",
    )
