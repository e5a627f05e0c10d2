"""Figures of costs: a step's time by part, and the weights of the rollout engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.collapse.curves import at_highest_rate
from analysis.collapse.data import GridData, show_arm, style_of
from analysis.collapse.grid import BF16, show_rate
from analysis.results import Array, Results, memory_source
from analysis.style import INK, add_legend, arm_style, name_rows, new_figure, write_at
from experiments.rl.metric_names import STEP_TIME
from experiments.runs.manifest import WeightMemory
from experiments.study.schema import Study
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


def draw_memory(study: Study, results: Results) -> Figure:
    """A panel a model: a bar an arm, its size and its share of BF16."""
    source = memory_source(study, (run.memory for run in results.manifests.values()))
    is_held = study.measures_engine
    figure, axes = new_figure(
        "Weight memory of the rollout engine" if is_held else "Weights sent to the rollout engine",
        f"Bars: {source}. Percentages: change from the BF16 arm.",
        height_inches=1.3 + 0.42 * len(study.arms),
        ncols=len(study.models),
        sharey=True,
    )
    for panel, model in zip(axes[0], study.models, strict=True):
        panel.set_title(model)
        bars = [
            Bar(arm_style(arm).label, arm_style(arm).color, results.memory_of(model, arm))
            for arm in study.arms
        ]
        _draw_weights(panel, bars, results.memory_of(model, "bf16"))
    add_legend(figure, axes[0][0])
    return figure


def draw_step_time(study: Study, results: Results) -> Figure:
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
    parts = _busy_parts(bars.values())
    for panel, model in zip(axes[0], study.models, strict=True):
        panel.set_title(model)
        arms = {arm_style(arm).label: bars[model, arm] for arm in study.arms}
        _draw_step_times(panel, arms, parts)
    add_legend(figure, axes[0][0])
    return figure


def draw_both(data: GridData) -> Figure:
    """The arms of `curves` at the highest rate, dense model."""
    shown = at_highest_rate(data)
    times = {show_arm(setting): partial(data.series, setting) for setting in shown}
    memories = {setting: data.memory(setting) for setting in shown}
    figure, (panels,) = new_figure(
        f"Costs at learning rate {show_rate(data.lrs[-1])}, {data.design.dense}",
        "Step: median over all steps but the first, of a seed each, then their mean; whisker: "
        "quartiles of these steps.\nRuns shared a machine, not with the same others in every arm "
        "(REPRODUCING.md).\n"
        f"Weights: {memory_source(data.study, memories.values())}. Percentages: change from BF16.",
        height_inches=1.75 + 0.42 * len(shown),
        ncols=2,
        sharey=False,
    )
    is_divided = all(data.records(setting, PARTS[0].key) for setting in shown)
    parts = _busy_parts(times.values()) if is_divided else []
    _draw_step_times(panels[0], times, parts)
    bars = [Bar(show_arm(setting), style_of(setting).color, it) for setting, it in memories.items()]
    bf16 = next((it for setting, it in memories.items() if setting.arm == BF16), None)
    _draw_weights(panels[1], bars, bf16)
    panels[1].tick_params(labelleft=False)
    add_legend(figure, *panels)
    return figure


def _busy_parts(bars: Iterable[Series]) -> list[Part]:
    """The parts that take time in any of the bars."""
    of_all = list(bars)
    return [it for it in PARTS if any(_seconds(series(it.key)) > IDLE_S for series in of_all)]


def _draw_step_times(panel: Axes, bars: Mapping[str, Series], parts: Sequence[Part]) -> None:
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
        write_at(panel, f"{step_s:.2f} s", max(left, quartiles[1]), position, points=4)
    panel.set(xlabel="seconds")
    panel.set_yticks(positions, bars)
    panel.margins(x=0.25)
    panel.grid(axis="y", visible=False)
    panel.tick_params(axis="y", length=0)


def _draw_weights(panel: Axes, bars: Sequence[Bar], bf16: WeightMemory | None) -> None:
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
        text = f"{length:.2f} {unit}" + ("" if share is None else f"  {share:+.1%}")
        write_at(panel, text, length, position)
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
    name_rows(panel, [bar.label for bar in bars])
    panel.grid(visible=False)
    panel.tick_params(axis="y", length=0)


def _seconds(values_ST: Array) -> float:
    """Median over a run's steps but the first, of seeds the mean."""
    return float(np.median(_later(values_ST), axis=1).mean())


def _later(values_ST: Array) -> Array:
    """All steps but the first."""
    return values_ST[:, 1:] if values_ST.shape[1] > 1 else values_ST
