"""Figure: weight memory of the rollout engine by arm, and its prediction from shapes."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.results import Results, memory_source
from analysis.style import INK, add_legend, arm_style, new_figure
from experiments.runs.manifest import WeightMemory
from experiments.study.schema import Study
from qat_core.units import MIB_PER_GIB

CAPTION = "Weights that the rollout engine holds or is sent, by arm, measured and predicted"


class Bar(NamedTuple):
    """The weights of an arm; None where it has no run."""

    label: str
    color: str
    memory: WeightMemory | None


def draw(study: Study, results: Results) -> Figure:
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
            Bar(style.label, style.color, results.memory_of(model, arm))
            for arm, style in ((arm, arm_style(arm)) for arm in study.arms)
        ]
        draw_panel(panel, bars, results.memory_of(model, "bf16"))
    add_legend(figure, axes[0][0])
    return figure


def draw_panel(panel: Axes, bars: Sequence[Bar], bf16: WeightMemory | None) -> None:
    """A bar each, from above: its size, its share of BF16's, and its prediction."""
    largest = max(bar.memory.measured_gib for bar in bars if bar.memory)
    unit, scale = ("GiB", 1.0) if largest >= 1 else ("MiB", float(MIB_PER_GIB))
    for position, (_, color, memory) in enumerate(bars):
        if memory is None:
            continue
        length = scale * memory.measured_gib
        panel.barh(position, length, height=0.62, color=color)
        share = memory.measured_gib / bf16.measured_gib - 1 if bf16 and memory != bf16 else None
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
            label="predicted from shapes" if position == 0 else None,
        )
    panel.set(xlim=(0, 1.42 * scale * largest), xlabel=f"weights ({unit})")
    panel.set_yticks(range(len(bars)), [bar.label for bar in bars])
    panel.set_ylim(len(bars) - 0.5, -0.5)
    panel.grid(visible=False)
    panel.tick_params(axis="y", length=0)
