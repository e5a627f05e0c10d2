"""Figure: where the time of a training step goes, by arm."""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.results import Array, Results
from analysis.style import INK, add_legend, arm_style, new_figure
from experiments.study.schema import Study
from qat_core.rl.metric_names import STEP_TIME

CAPTION = "Median time of a training step by part, all arms"
IDLE_S = 1e-3  # a part that takes less had nothing to do


class Part(NamedTuple):
    """A part of a step: its metric, and its looks, which are distinct without colour too."""

    key: str
    label: str
    color: str
    hatch: str


PARTS = (
    Part("timing_s/gen", "rollout", "#4477aa", ""),
    Part("timing_s/old_log_prob", "log-probs", "#ccbb44", "///"),
    Part("timing_s/update_actor", "update", "#aa3377", "..."),
    Part("timing_s/update_weights", "weight sync", "#228833", "xxx"),
)
OTHER = Part("", "other", "#cccccc", "")


def draw(study: Study, results: Results) -> Figure:
    """A panel a model, a bar an arm, its parts one after another."""
    figure, axes = new_figure(
        "Time of a training step by part",
        "Bars: medians of each part over all steps but the first, in which everything is loaded; "
        "of a seed each, then their mean.\nNumber: the same of the whole step, to which the parts' "
        "medians need not add up. Whisker: quartiles of these steps.\n"
        "Other: advantages and waiting; through verl checkpoints too.",
        height_inches=1.62 + 0.42 * len(study.arms),
        ncols=len(study.models),
        sharey=True,
    )
    bars = list(product(study.models, study.arms))
    parts = [it for it in PARTS if any(_seconds(results, *bar, it.key) > IDLE_S for bar in bars)]
    for panel, model in zip(axes[0], study.models, strict=True):
        _draw_panel(panel, study, results, model, parts)
    add_legend(figure, axes[0][0])
    return figure


def _draw_panel(
    panel: Axes, study: Study, results: Results, model: str, parts: Sequence[Part]
) -> None:
    positions = np.arange(len(study.arms))[::-1]
    for position, arm in zip(positions, study.arms, strict=True):
        step_s = _seconds(results, model, arm, STEP_TIME)
        seconds_of = {part: _seconds(results, model, arm, part.key) for part in parts}
        seconds_of[OTHER] = max(0.0, step_s - sum(seconds_of.values()))
        left = 0.0
        for (_, label, color, hatch), seconds in seconds_of.items():
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
        quartiles = np.percentile(_steps(results, model, arm, STEP_TIME), (25, 75))
        panel.plot(quartiles, [position] * 2, "|-", color=INK, linewidth=1.2, markersize=7)
        panel.annotate(
            f"{step_s:.2f} s",
            (max(left, quartiles[1]), position),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    panel.set(title=model, xlabel="seconds")
    panel.set_yticks(positions, [arm_style(arm).label for arm in study.arms])
    panel.margins(x=0.25)
    panel.grid(axis="y", visible=False)
    panel.tick_params(axis="y", length=0)


def _seconds(results: Results, model: str, arm: str, key: str) -> float:
    """Median over a run's steps but the first, of seeds the mean."""
    return float(np.median(_steps(results, model, arm, key), axis=1).mean())


def _steps(results: Results, model: str, arm: str, key: str) -> Array:
    """All steps but the first, (seeds, steps)."""
    values_ST = results.series(model, arm, key)
    return values_ST[:, 1:] if values_ST.shape[1] > 1 else values_ST
