"""Bars that figures of costs share: a step's time by part, and the rollout engine's weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from analysis.results import Array
from analysis.style import INK
from experiments.rl.metric_names import STEP_TIME
from experiments.runs.manifest import WeightMemory
from qat_core.units import MIB_PER_GIB

Series = Callable[[str], Array]  # a metric as (seeds, steps)
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


class Bar(NamedTuple):
    """The weights of an arm; None where it has no run."""

    label: str
    color: str
    memory: WeightMemory | None


def busy_parts(bars: Iterable[Series]) -> list[Part]:
    """The parts that take time in any of the bars."""
    of_all = list(bars)
    return [it for it in PARTS if any(_seconds(series(it.key)) > IDLE_S for series in of_all)]


def draw_step_times(panel: Axes, bars: Mapping[str, Series], parts: Sequence[Part]) -> None:
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


def draw_weights(panel: Axes, bars: Sequence[Bar], bf16: WeightMemory | None) -> None:
    """A bar each, from above: its size, its share of BF16's, and its prediction."""
    largest = max(bar.memory.measured_gib for bar in bars if bar.memory)
    first = next(position for position, bar in enumerate(bars) if bar.memory)
    unit, scale = ("GiB", 1.0) if largest >= 1 else ("MiB", float(MIB_PER_GIB))
    for position, (_, color, memory) in enumerate(bars):
        if memory is None:
            continue
        length = scale * memory.measured_gib
        panel.barh(position, length, height=0.62, color=color)
        share = memory.measured_gib / bf16.measured_gib - 1 if bf16 and memory is not bf16 else None
        panel.annotate(
            f"{length:.2f} {unit}" + ("" if share is None else f"  {share:+.1%}"),
            (length, position),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
        panel.plot(
            scale * memory.predicted_gib,
            position,
            "|",
            color=INK,
            markersize=15,
            markeredgewidth=1.6,
            label="predicted from shapes" if position == first else None,
        )
    panel.set(xlim=(0, 1.42 * scale * largest), xlabel=f"weights ({unit})")
    panel.set_yticks(range(len(bars)), [bar.label for bar in bars])
    panel.set_ylim(len(bars) - 0.5, -0.5)
    panel.grid(visible=False)
    panel.tick_params(axis="y", length=0)


def _seconds(values_ST: Array) -> float:
    """Median over a run's steps but the first, of seeds the mean."""
    return float(np.median(_later(values_ST), axis=1).mean())


def _later(values_ST: Array) -> Array:
    """All steps but the first."""
    return values_ST[:, 1:] if values_ST.shape[1] > 1 else values_ST
