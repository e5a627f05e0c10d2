"""Figure: where the time of a training step goes, by arm."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
WHOLE = OTHER._replace(label="whole step")


Series = Callable[[str], Array]  # a metric as (seeds, steps)


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
    bars = {
        (model, arm): partial(results.series, model, arm)
        for model, arm in product(study.models, study.arms)
    }
    parts = busy_parts(bars.values())
    for panel, model in zip(axes[0], study.models, strict=True):
        panel.set_title(model)
        arms = {arm_style(arm).label: bars[model, arm] for arm in study.arms}
        draw_panel(panel, arms, parts)
    add_legend(figure, axes[0][0])
    return figure


def busy_parts(bars: Iterable[Series]) -> list[Part]:
    """The parts that take time in any of the bars."""
    of_all = list(bars)
    return [it for it in PARTS if any(_seconds(series(it.key)) > IDLE_S for series in of_all)]


def draw_panel(panel: Axes, bars: Mapping[str, Series], parts: Sequence[Part]) -> None:
    """A bar for each label, from above; what is in none of the parts is `other`."""
    rest = OTHER if parts else WHOLE
    positions = np.arange(len(bars))[::-1]
    for position, series in zip(positions, bars.values(), strict=True):
        step_s = _seconds(series(STEP_TIME))
        seconds_of = {part: _seconds(series(part.key)) for part in parts}
        seconds_of[rest] = max(0.0, step_s - sum(seconds_of.values()))
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
        quartiles = np.percentile(_later(series(STEP_TIME)), (25, 75))
        panel.plot(quartiles, [position] * 2, "|-", color=INK, linewidth=1.2, markersize=7)
        panel.annotate(
            f"{step_s:.2f} s",
            (max(left, quartiles[1]), position),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    panel.set(xlabel="seconds")
    panel.set_yticks(positions, bars)
    panel.margins(x=0.25)
    panel.grid(axis="y", visible=False)
    panel.tick_params(axis="y", length=0)


def _seconds(values_ST: Array) -> float:
    """Median over a run's steps but the first, of seeds the mean."""
    return float(np.median(_later(values_ST), axis=1).mean())


def _later(values_ST: Array) -> Array:
    """All steps but the first."""
    return values_ST[:, 1:] if values_ST.shape[1] > 1 else values_ST
