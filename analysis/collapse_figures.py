"""Figures of the study `collapse`: `python -m analysis.collapse_figures --study FILE ...`.

`curves`: reward and k3 KL by step with a thin line a seed; `survival`: the share of seeds that
survive by learning rate; `corrections`: when each run of a correction collapsed; `drift`: which
weights drift first, where the study watches it.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.collapse import DECISIVE_LR
from analysis.collapse_grid import (
    BF16,
    DENSE,
    NOQAT,
    QAT,
    Grid,
    Setting,
    read_grid,
    setting_of,
)
from analysis.drift import order
from analysis.figure_files import DRIFT, FORMATS, figure_names
from analysis.load import read_metrics
from analysis.style import add_legend, arm_style, new_figure, save_figure
from analysis.survival import WINDOW, Outcome, share_collapsed, smoothed
from experiments.runs.drift import read_drift
from experiments.study.load import load_study
from experiments.study.schema import Study
from experiments.support.cli import STUDY, run_cli
from qat_core.rl.metric_names import K3_KL, REWARD

ARMS = (BF16, NOQAT, QAT)
CORRECTIONS = {
    "none": "none",
    "token_tis": "token TIS, 2.0",
    "sequence_mask": "sequence mask",
    "score_centering": "score centering",
}
DODGE = 0.06  # of the distance of two learning rates, between arms


def show_rate(lr: float) -> str:
    """A learning rate as studies write it, such as 3e-4."""
    mantissa, exponent = f"{lr:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def draw_curves(study: Study, results: Path, grid: Grid, lr: float = DECISIVE_LR) -> Figure:
    """Reward and mismatch of the three arms at one learning rate, dense model."""
    figure, axes = new_figure(
        f"Reward and mismatch by training step, {DENSE}, learning rate {show_rate(lr)}",
        f"Thin lines: the seeds; thick line: their median; all means over {WINDOW} steps.",
        height_inches=3.6,
        ncols=2,
    )
    reward, mismatch = axes[0]
    for arm in ARMS:
        setting = Setting(DENSE, arm, lr)
        if setting in grid:
            _draw_arm(reward, study, results, setting, REWARD)
            _draw_arm(mismatch, study, results, setting, K3_KL)
    reward.set(xlabel="training step", ylabel="mean reward", ylim=(-0.02, 1.02))
    mismatch.set(xlabel="training step", ylabel="k3 KL, nats a token", yscale="log")
    add_legend(figure, reward)
    return figure


def _draw_arm(axes: Axes, study: Study, results: Path, setting: Setting, metric: str) -> None:
    style = arm_style(setting.arm)
    runs = [run for run in study.runs if setting_of(study, run) == setting]
    series = [smoothed(read_metrics(results / r.id)[metric].to_numpy(float)) for r in runs]
    steps = np.arange(WINDOW, WINDOW + len(series[0]))
    for values in series:
        axes.plot(steps, values, color=style.color, linewidth=0.8, alpha=0.55)
    median = np.median(np.stack(series), axis=0)
    axes.plot(steps, median, color=style.color, linewidth=2.2, label=style.label)


def draw_survival(study: Study, results: Path, grid: Grid) -> Figure:
    """Share of seeds alive at the last step by learning rate, with exact 95 % intervals."""
    figure, axes = new_figure(
        f"Runs that survive {study.rl.steps} steps, by learning rate, {DENSE}",
        "Bars: exact 95 % intervals (Clopper-Pearson) of the share of seeds.",
        height_inches=3.4,
    )
    panel = axes[0][0]
    lrs = sorted({setting.lr for setting in grid if setting == Setting(DENSE, BF16, setting.lr)})
    for position, arm in enumerate(ARMS):
        style = arm_style(arm)
        judged = [(i, Setting(DENSE, arm, lr)) for i, lr in enumerate(lrs)]
        judged = [(i, setting) for i, setting in judged if setting in grid]
        x = np.array([i + DODGE * (position - 1) for i, _ in judged])
        shares = [share_collapsed(grid[setting]) for _, setting in judged]
        alive = np.array([1 - share.estimate for share in shares])
        # never None, but an Interval may have ends that are
        dead = np.array([(share.low, share.high) for share in shares], dtype=float)
        bars = [alive - (1 - dead[:, 1]), (1 - dead[:, 0]) - alive]
        panel.errorbar(
            x,
            alive,
            yerr=np.clip(bars, 0, None),
            color=style.color,
            label=style.label,
            marker="o",
            linewidth=1.6,
            elinewidth=1.0,
            capsize=3,
        )
    panel.set_xticks(range(len(lrs)), [show_rate(lr) for lr in lrs])
    panel.set(xlabel="learning rate", ylabel="share of seeds", ylim=(-0.03, 1.03))
    add_legend(figure, panel)
    return figure


def draw_corrections(study: Study, results: Path, grid: Grid) -> Figure:
    """When the runs without QAT collapsed, by correction, next to QAT and BF16."""
    rows: list[tuple[str, Setting]] = [
        (f"no QAT, {label}", Setting(DENSE, NOQAT, DECISIVE_LR, correction))
        for correction, label in CORRECTIONS.items()
    ]
    rows += [(arm_style(arm).label, Setting(DENSE, arm, DECISIVE_LR)) for arm in (QAT, BF16)]
    rows = [(label, setting) for label, setting in rows if setting in grid]
    figure, axes = new_figure(
        f"Time to collapse by correction, {DENSE}, learning rate {show_rate(DECISIVE_LR)}",
        "A mark a seed; open marks at the right: alive at the last step. Numbers: collapsed runs.",
        height_inches=1.6 + 0.36 * len(rows),
    )
    panel = axes[0][0]
    for y, (_, setting) in enumerate(rows):
        _draw_times(panel, grid[setting], y, arm_style(setting.arm).color)
    panel.set_yticks(range(len(rows)), [label for label, _ in rows])
    panel.set(xlabel="training step", xlim=(0, 1.14 * study.rl.steps), ylim=(len(rows) - 0.5, -0.5))
    return figure


def _draw_times(panel: Axes, outcomes: Sequence[Outcome], y: int, color: str) -> None:
    dead = [it.collapsed for it in outcomes if it.collapsed is not None]
    alive = [it.num_steps for it in outcomes if it.collapsed is None]
    panel.plot(dead, [y] * len(dead), "o", color=color, markersize=7, alpha=0.8)
    spread = y + 0.1 * (np.arange(len(alive)) - (len(alive) - 1) / 2)
    panel.plot(alive, spread, "o", color=color, markersize=5, fillstyle="none")
    panel.annotate(
        f"{len(dead)} of {len(outcomes)}",
        xy=(1.0, y),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="center",
        color=color,
        fontweight="bold",
    )


def draw_drift(study: Study, results: Path, grid: Grid) -> Figure:
    """When the NVFP4 codes of each layer and kind of weight have moved, by arm."""
    return order.draw({DENSE: drift_runs(study, results, grid)})


def drift_runs(study: Study, results: Path, grid: Grid) -> order.Runs:
    """The drift without QAT and with it, dense model, decisive learning rate.

    Raises:
        ValueError: neither arm has all its runs, or one has no drift.
    """
    settings = [Setting(DENSE, arm, DECISIVE_LR) for arm in (NOQAT, QAT)]
    complete = [setting for setting in settings if setting in grid]
    if not complete:
        rate = show_rate(DECISIVE_LR)
        raise ValueError(f"{results}: no arm of {DENSE} at {rate} has all its runs; run the study")
    return {
        arm_style(setting.arm).label: [
            read_drift(results / run.id) for run in study.runs if setting_of(study, run) == setting
        ]
        for setting in complete
    }


FIGURES = {
    "curves": draw_curves,
    "survival": draw_survival,
    "corrections": draw_corrections,
    DRIFT: draw_drift,
}


def main() -> None:
    """Writes every figure as PNG and SVG."""
    parser = argparse.ArgumentParser(description=__doc__, parents=[STUDY])
    parser.add_argument("--results", type=Path, required=True, help="results or records folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    arguments = parser.parse_args()
    study = load_study(arguments.study)
    grid = read_grid(study, arguments.results)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in figure_names(study):
        drawn = partial(FIGURES[name], study, arguments.results, grid)
        save_figure(drawn, *(arguments.out / f"{name}.{kind}" for kind in FORMATS))


if __name__ == "__main__":
    run_cli(main)
