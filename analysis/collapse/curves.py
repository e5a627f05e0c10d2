"""Figure `curves`: reward and mismatch by training step, with a thin line a seed."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.collapse.data import GridData
from analysis.collapse.grid import BF16, NOQAT, QAT, Setting, show_rate
from analysis.collapse.survival import WINDOW, smoothed
from analysis.style import STAR, add_legend, arm_style, new_figure
from qat_core.rl.metric_names import K3_KL, REWARD

CAPTION = "Reward and k3 KL by training step: a line a seed, a star where a run collapses"
ARMS = (BF16, NOQAT, QAT)
MARK_EVERY = 30  # steps between the markers of a median


def draw(data: GridData) -> Figure:
    """The arms at the two highest learning rates, a column each, dense model."""
    lrs = data.design.lrs[-2:]
    figure, axes = new_figure(
        f"Reward and mismatch of {data.design.dense} by training step",
        f"Thin lines: single seeds. Thick lines: their median. All are means over {WINDOW} steps. "
        "Star: the run has collapsed.",
        height_inches=5.0,
        nrows=2,
        ncols=len(lrs),
        sharex=True,
        sharey="row",
    )
    for column, lr in enumerate(lrs):
        reward, mismatch = axes[0][column], axes[1][column]
        reward.set_title(f"learning rate {show_rate(lr)}")
        for position, arm in enumerate(ARMS):
            setting = data.design.plain(arm, lr)
            if setting in data.grid:
                _draw_arm(reward, data, setting, REWARD, position)
                _draw_arm(mismatch, data, setting, K3_KL, position)
        mismatch.set(xlabel="training step", yscale="log")
    axes[0][0].set(ylabel="online reward\n(mean of responses)", ylim=(-0.02, 1.02))
    axes[1][0].set(ylabel="k3 KL\n(nats a token)")
    add_legend(figure, axes[0][0])
    return figure


def _draw_arm(axes: Axes, data: GridData, setting: Setting, metric: str, position: int) -> None:
    style = arm_style(setting.arm)
    smooth_ST = np.stack([smoothed(values_T) for values_T in data.series(setting, metric)])
    steps_T = np.arange(WINDOW, WINDOW + smooth_ST.shape[1])
    for values_T, outcome in zip(smooth_ST, data.grid[setting], strict=True):
        axes.plot(steps_T, values_T, color=style.color, ls=style.dashes, lw=0.8, alpha=0.6)
        if outcome.collapsed is not None:
            at = outcome.collapsed - WINDOW
            axes.plot(steps_T[at], values_T[at], color=style.color, **STAR)
    axes.plot(
        steps_T,
        np.median(smooth_ST, axis=0),
        color=style.color,
        linestyle=style.dashes,
        linewidth=2.2,
        label=style.label,
        marker=style.marker,
        markersize=5,
        markevery=(position * MARK_EVERY // len(ARMS), MARK_EVERY),
    )
