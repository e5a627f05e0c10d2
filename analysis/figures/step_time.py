"""Figure: where the time of a training step goes, by arm."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.results import Results
from analysis.style import INK, add_legend, arm_style, new_figure
from experiments.study.schema import Study
from qat_core.rl.metric_names import STEP_TIME

CAPTION = "Median time of a training step by part, all arms"
# colour and hatch of each part: distinct without colour too
PARTS = {
    "timing_s/gen": ("rollout", "#4477aa", ""),
    "timing_s/old_log_prob": ("log-probs", "#ccbb44", "///"),
    "timing_s/update_actor": ("update", "#aa3377", "..."),
    "timing_s/update_weights": ("weight sync", "#228833", "xxx"),
}
OTHER = ("other", "#cccccc", "")


def draw(study: Study, results: Results) -> Figure:
    """A panel a model, a bar an arm, its parts one after another."""
    figure, axes = new_figure(
        "Time of a training step by part",
        "Bars: medians of each part over all steps but the first, in which everything is loaded; "
        "of a seed each, then their mean.\nNumber: the same of the whole step, to which the parts' "
        "medians need not add up. Other: advantages, checkpoints and waiting.",
        height_inches=1.46 + 0.42 * len(study.arms),
        ncols=len(study.models),
        sharey=True,
    )
    for panel, model in zip(axes[0], study.models, strict=True):
        _draw_panel(panel, study, results, model)
    add_legend(figure, axes[0][0])
    return figure


def _draw_panel(panel: Axes, study: Study, results: Results, model: str) -> None:
    positions = np.arange(len(study.arms))[::-1]
    for position, arm in zip(positions, study.arms, strict=True):
        step_s = _seconds(results, model, arm, STEP_TIME)
        parts = {look: _seconds(results, model, arm, key) for key, look in PARTS.items()}
        parts[OTHER] = max(0.0, step_s - sum(parts.values()))
        left = 0.0
        for (label, color, hatch), seconds in parts.items():
            panel.barh(
                position,
                seconds,
                left=left,
                height=0.6,
                color=color,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.5,
                label=label if position == 0 else None,
            )
            left += seconds
        panel.annotate(
            f"{step_s:.2f} s",
            (left, position),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    panel.set(title=model, xlabel="seconds")
    panel.set_yticks(positions, [arm_style(arm).label for arm in study.arms])
    panel.margins(x=0.15)
    panel.grid(axis="y", visible=False)
    panel.tick_params(axis="y", length=0)


def _seconds(results: Results, model: str, arm: str, key: str) -> float:
    """Median over a run's steps but the first, of seeds the mean."""
    values_ST = results.series(model, arm, key)
    return float(
        np.median(values_ST[:, 1:] if values_ST.shape[1] > 1 else values_ST, axis=1).mean()
    )
