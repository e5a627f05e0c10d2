"""Figure: mismatch of rollout and trainer (k3 KL) by training step, all arms."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.claims_table import show_ratio
from analysis.metrics import CATALOGUE
from analysis.results import Results
from analysis.stats import interquartile_mean
from analysis.style import (
    INK,
    add_legend,
    arm_style,
    new_figure,
    plot_over_seeds,
    seeds_note,
    spread_labels,
)
from experiments.study.schema import Study
from qat_core.rl.metric_names import K3_KL

CAPTION = "k3 KL of rollout and trainer by training step on a log axis, all arms"


def draw(study: Study, results: Results) -> Figure:
    """One panel a model: mean over seeds and their range, the noise floor, ratios to it."""
    overflowed = any(
        np.isnan(results.series(model, arm, K3_KL)).any()
        for model in study.models
        for arm in study.arms
    )
    figure, axes = new_figure(
        "Mismatch of rollout and trainer by training step",
        f"{seeds_note(study, results)}{' Gap: overflow.' if overflowed else ''}\n"
        "Dotted: noise floor, BF16's interquartile mean. "
        "At the right: the arm's over BF16's of the same steps.",
        height_inches=3.9,
        ncols=len(study.models),
        sharey=True,
    )
    for panel, model in zip(axes[0], study.models, strict=True):
        panel.set(title=model, yscale="log")
        plot_over_seeds(panel, study, results, model, K3_KL)
    # the panels share limits, so labels are placed once all panels have their lines
    for panel, model in zip(axes[0], study.models, strict=True):
        _label_ratios(panel, study, results, model)
    axes[0][0].set_ylabel(CATALOGUE[K3_KL].axis_label)
    add_legend(figure, axes[0][0])
    return figure


def _label_ratios(panel: Axes, study: Study, results: Results, model: str) -> None:
    if "bf16" not in study.arms:
        return
    means: dict[str, float] = {}
    labels = {"bf16": "noise floor"}
    for arm in study.arms:
        kl_ST, noise_ST = results.series_beside(model, arm, "bf16", K3_KL)
        means[arm] = float(interquartile_mean(np.nan_to_num(kl_ST, nan=np.inf)))
        floor = float(interquartile_mean(noise_ST))  # 0 of very few tokens
        labels.setdefault(arm, show_ratio(means[arm] / floor) if floor else "")
    panel.axhline(means["bf16"], color=INK, linestyle=":", linewidth=1.2, zorder=3)
    for name, height in spread_labels(panel, means).items():
        panel.annotate(
            labels[name],
            xy=(1.015, height),
            xycoords="axes fraction",
            va="center",
            color=arm_style(name).color,
            fontweight="bold",
        )
