"""Figure: weight memory by arm, measured in this study and predicted for the Qwen3 models."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.results import Results, memory_source
from analysis.style import INK, add_legend, arm_style, new_figure
from experiments.study.schema import ROOT, Study
from qat_core.memory import Precision, predict_weight_memory_gib
from qat_core.units import MIB_PER_GIB

CAPTION = "Weight memory by arm: measured against predicted, and predicted for Qwen3"
QWEN3 = ("qwen3-8b", "qwen3-30b-a3b")
PRECISIONS: Mapping[str, Precision] = {"bf16": "bf16", "nvfp4-qat": "full", "nvfp4-qat-ffn": "ffn"}
NUM_COLUMNS = 2


@dataclass(frozen=True)
class Bar:
    """Weight memory of one arm in GiB; measured is None for a model that was not run."""

    arm: str
    predicted_gib: float
    measured_gib: float | None
    share_of_bf16: float

    @property
    def length_gib(self) -> float:
        """The measurement, or the prediction where there is none."""
        return self.predicted_gib if self.measured_gib is None else self.measured_gib


def draw(study: Study, results: Results) -> Figure:
    """A panel a model: a bar an arm, its size and its share of BF16."""
    panels = {f"{model}, measured": _measured(study, results, model) for model in study.models}
    panels |= _qwen3_predictions()
    num_rows = -(-len(panels) // NUM_COLUMNS)
    figure, axes = new_figure(
        "Weight memory of the rollout engine",
        f"Bars: measured, {memory_source(study)}; pale bars: predicted only. "
        "Percentages: against the bytes of the same weights in BF16.",
        height_inches=0.9 + 1.55 * num_rows,
        nrows=num_rows,
        ncols=NUM_COLUMNS,
    )
    for panel, (title, bars) in zip(axes.flat, panels.items(), strict=False):
        _draw_bars(panel, title, bars)
    for unused in axes.flat[len(panels) :]:
        unused.set_axis_off()
    add_legend(figure, axes.flat[0])
    return figure


def _measured(study: Study, results: Results, model: str) -> list[Bar]:
    memories = {run.arm: run.memory for run in results.manifests.values() if run.model == model}
    return [
        Bar(arm, it.predicted_gib, it.measured_gib, it.share_of_bf16)
        for arm, it in memories.items()
    ]


def _qwen3_predictions() -> dict[str, list[Bar]]:
    panels = {}
    for name in QWEN3:
        config = json.loads((ROOT / "experiments" / "models" / f"{name}.json").read_text())
        sizes_gib = {
            arm: predict_weight_memory_gib(config, precision)
            for arm, precision in PRECISIONS.items()
        }
        panels[f"{name}, predicted"] = [
            Bar(arm, gib, None, gib / sizes_gib["bf16"]) for arm, gib in sizes_gib.items()
        ]
    return panels


def _draw_bars(panel: Axes, title: str, bars: list[Bar]) -> None:
    largest = max(bar.length_gib for bar in bars)
    unit, scale = ("GiB", 1.0) if largest >= 1 else ("MiB", float(MIB_PER_GIB))
    positions = np.arange(len(bars))[::-1]
    for position, bar in zip(positions, bars, strict=True):
        length = scale * bar.length_gib
        opacity = 1.0 if bar.measured_gib is not None else 0.6
        panel.barh(position, length, color=arm_style(bar.arm).color, height=0.62, alpha=opacity)
        share = "" if bar.arm == "bf16" else f"  {bar.share_of_bf16 - 1:+.1%}"
        panel.annotate(
            f"{length:.2f} {unit}{share}",
            (length, position),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    measured = [bar.measured_gib is not None for bar in bars]
    predicted = scale * np.array([bar.predicted_gib for bar in bars])[measured]
    panel.plot(
        predicted,
        positions[measured],
        "|",
        color=INK,
        ms=15,
        mew=1.6,
        label="predicted from shapes",
    )
    panel.set(title=title, xlim=(0, 1.38 * scale * largest))
    panel.set_yticks(positions, [arm_style(bar.arm).label for bar in bars])
    panel.grid(visible=False)
    panel.tick_params(axis="y", length=0)
