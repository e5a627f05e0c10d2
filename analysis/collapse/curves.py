"""Figures `curves` and `behaviour`: metrics by training step, a column an arm."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.collapse.data import GridData, show_arm, style_of
from analysis.collapse.grid import (
    BF16,
    BF16_EXACT,
    NOQAT,
    QAT,
    QAT_EXACT,
    Setting,
    num_collapsed,
    show_rate,
)
from analysis.collapse.survival import WINDOW, smoothed
from analysis.figure_files import MANY_SEEDS
from analysis.results import Array
from analysis.stats import over_seeds
from analysis.style import STAR, ArmStyle, new_figure
from experiments.rl.config import Correction
from experiments.rl.metric_names import K3_KL, RESPONSE_TOKENS, REWARD
from experiments.study.arms import ArmName

# in the middle the strongest rival of QAT
COLUMNS: tuple[tuple[ArmName, Correction], ...] = (
    (BF16, "none"),
    (NOQAT, "none"),
    (NOQAT, "token_tis"),
    (QAT, "none"),
    (QAT_EXACT, "none"),
    (BF16_EXACT, "none"),
)
NUM_RATES = 2  # the highest
METRICS = {
    RESPONSE_TOKENS: "response length\n(tokens)",
    "actor/entropy": "policy entropy\n(nats a token)",
    "rollout_corr/kl": "rollout_corr/kl (k1)\n(nats a token)",
}
LINEAR_BELOW = 1e-4  # nats: k1 KL has both signs, and near zero is noise


def draw(data: GridData) -> Figure:
    """The arms at the highest learning rates, dense model: of each rate reward and mismatch."""
    lower, lrs = data.lrs[:-NUM_RATES], data.lrs[-NUM_RATES:]
    settings = [
        [data.design.plain(arm, lr)._replace(correction=correction) for lr in lrs]
        for arm, correction in COLUMNS
    ]
    shown = [its for its in settings if any(setting in data.grid for setting in its)]
    left_out = f" Not drawn: {', '.join(map(show_rate, lower))}." if lower else ""
    figure, axes = new_figure(
        f"Reward and mismatch by training step, {data.design.dense}",
        f"{lines_note(data)} A spike stays for {WINDOW} steps, a run's k3 KL ends with it.\n"
        "Rewards are of an arm's own rollouts, "
        "those of BF16 from weights that are not rounded.\n"
        f"Above the panels: the learning rate, and how many runs collapsed.{left_out}",
        height_inches=1.06 + 3.9 * len(lrs),
        has_legend=False,
        nrows=2 * len(lrs),
        ncols=len(shown),
        sharex=True,
        sharey="row",
    )
    for column, its in zip(axes.T, shown, strict=True):
        for setting, reward, mismatch in zip(its, column[::2], column[1::2], strict=True):
            mismatch.set_yscale("log")
            if setting in data.grid:
                draw_runs(reward, data, setting, REWARD)
                draw_runs(mismatch, data, setting, K3_KL)
                outcomes = data.grid[setting]
                became = f"{num_collapsed(outcomes)} of {len(outcomes)} collapsed"
            else:
                reward.set_axis_off()
                mismatch.set_axis_off()
                became = "not run"
            title = f"{show_arm(setting)}\n{show_rate(setting.lr)}: {became}"
            reward.set_title(title, fontsize=9.5)
        column[-1].set_xlabel("training step")
    for reward, mismatch in zip(axes[::2, 0], axes[1::2, 0], strict=True):
        reward.set(ylabel="online reward\n(mean of responses)", ylim=(-0.02, 1.02))
        mismatch.set_ylabel("k3 KL\n(nats a token)")
    for panel in axes.flat:
        panel.set_xlim(0, data.study.rl.steps)
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        panel.minorticks_off()
    return figure


def at_highest_rate(data: GridData) -> list[Setting]:
    """The settings of COLUMNS at the highest rate that have all their runs."""
    settings = [data.design.plain(arm, data.lrs[-1])._replace(correction=it) for arm, it in COLUMNS]
    return [setting for setting in settings if setting in data.grid]


def lines_note(data: GridData) -> str:
    """What the lines of `draw_runs` are."""
    if len(data.study.seeds) > MANY_SEEDS:
        return (
            f"Line: mean over seeds and {WINDOW} steps (of k3 KL geometric); band: 95 % interval."
        )
    return f"A line: a seed, mean over {WINDOW} steps. Star: the run has collapsed."


def draw_band(axes: Axes, values_ST: Array, style: ArmStyle, is_log: bool) -> None:
    """The mean over seeds and its interval at each step, smoothed."""
    smooth_ST = np.stack([smoothed(values_T) for values_T in values_ST])
    columns_TS = (np.log(smooth_ST) if is_log else smooth_ST).T
    intervals = [over_seeds(column_S[np.isfinite(column_S)]) for column_S in columns_TS]
    ends_3T = np.array([(it.estimate, it.low, it.high) for it in intervals], dtype=float).T
    middle_T, low_T, high_T = np.exp(ends_3T) if is_log else ends_3T
    steps_T = np.arange(WINDOW, WINDOW + len(middle_T))
    axes.fill_between(steps_T, low_T, high_T, color=style.color, alpha=0.2, linewidth=0)
    axes.plot(steps_T, middle_T, **style.line, label=style.label)


def draw_runs(axes: Axes, data: GridData, setting: Setting, metric: str) -> None:
    """A line a run, smoothed, with a star where it has collapsed; of many their mean."""
    style, values_ST = style_of(setting), data.series(setting, metric)
    if metric == K3_KL and not values_ST.any():  # no place on a log axis
        axes.text(0.5, 0.5, "0 at every step", transform=axes.transAxes, ha="center")
        return
    if len(values_ST) > MANY_SEEDS:
        draw_band(axes, values_ST, style, is_log=metric == K3_KL)
        return
    for values_T, outcome in zip(values_ST, data.grid[setting], strict=True):
        smooth_T = smoothed(values_T)
        at = None if outcome.collapsed is None else outcome.collapsed - WINDOW
        if metric == K3_KL and at is not None:
            smooth_T = smooth_T[: at + 1]
        steps_T = np.arange(WINDOW, WINDOW + len(smooth_T))
        axes.plot(steps_T, smooth_T, **style.line, linewidth=1.0)
        if at is not None:
            axes.plot(steps_T[at], smooth_T[at], color=style.color, **STAR)


def draw_behaviour(data: GridData) -> Figure:
    """The arms of `curves` at the highest rate, dense model."""
    shown = at_highest_rate(data)
    figure, axes = new_figure(
        f"Training by step at learning rate {show_rate(data.lrs[-1])}, {data.design.dense}",
        f"{lines_note(data)}\nrollout_corr/kl: "
        "mean of log q - log p of the sampled tokens,\nq the rollout's probability, p the "
        f"trainer's, as verl's recipe shows it; log axis, linear within {LINEAR_BELOW:g}.",
        height_inches=0.9 + 1.75 * len(METRICS),
        has_legend=False,
        nrows=len(METRICS),
        ncols=len(shown),
        sharex=True,
        sharey="row",
    )
    for column, setting in zip(axes.T, shown, strict=True):
        column[0].set_title(show_arm(setting), fontsize=9.5)
        column[-1].set_xlabel("training step")
        for panel, metric in zip(column, METRICS, strict=True):
            draw_runs(panel, data, setting, metric)
            panel.set_xlim(0, data.study.rl.steps)
            panel.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    for row, label in zip(axes, METRICS.values(), strict=True):
        row[0].set_ylabel(label)
    axes[-1][0].set_yscale("symlog", linthresh=LINEAR_BELOW)
    # else as far below zero as above it
    lowest = min(panel.dataLim.ymin for panel in axes[-1])
    axes[-1][0].set_ylim(bottom=2 * min(lowest, 0.0) - LINEAR_BELOW / 2)
    for panel in axes.flat:
        panel.minorticks_off()
    return figure
