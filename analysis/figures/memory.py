"""Figure: weight memory by arm, in this study and of the Qwen3 models at true size."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.results import Results, memory_source
from analysis.style import INK, add_legend, arm_style, new_figure
from analysis.tables.engines import ROLLOUTS, reported_weights_gib
from experiments.study.schema import ROOT, Study
from qat_core.memory import Precision, predict_weight_memory_gib
from qat_core.units import MIB_PER_GIB

CAPTION = "Weight memory by arm in this study, and Qwen3's as vLLM reported it on an H200"
QWEN3 = ("qwen3-8b", "qwen3-30b-a3b")
RECORDS = ROOT / "experiments" / "records" / "benchmarks"
MACHINE = "h200"
SOURCES = (
    *(f"experiments/models/{name}.json" for name in QWEN3),
    *(f"experiments/records/benchmarks/{name}_{MACHINE}.json" for name in ROLLOUTS),
)
# what a record of engines calls an arm's precision; it has none of FFN only
PRECISIONS: Mapping[str, tuple[Precision, str | None]] = {
    "bf16": ("bf16", "bf16"),
    "nvfp4-qat": ("full", "nvfp4"),
    "nvfp4-qat-ffn": ("ffn", None),
}
NUM_COLUMNS = 2


@dataclass(frozen=True)
class Bar:
    """Weight memory of one arm in GiB; measured is None where no record has it."""

    arm: str
    predicted_gib: float
    measured_gib: float | None

    @property
    def length_gib(self) -> float:
        """The measurement, or the prediction where there is none."""
        return self.predicted_gib if self.measured_gib is None else self.measured_gib


def draw(study: Study, results: Results) -> Figure:
    """A panel a model: a bar an arm, its size and its share of BF16."""
    panels = {model: _measured(study, results, model) for model in study.models}
    panels |= {f"{name}, one H200": _qwen3(name) for name in QWEN3}
    num_rows = -(-len(panels) // NUM_COLUMNS)
    figure, axes = new_figure(
        "Weight memory of the rollout engine",
        f"{' and '.join(study.models)}: {_source(study, results)}.\nQwen3, random weights: as "
        "vLLM reports, with the gaps that PyTorch's allocator leaves.\nHatched: predicted from "
        "shapes, not measured. Percentages: change from the BF16 arm.",
        height_inches=1.1 + 1.65 * num_rows,
        nrows=num_rows,
        ncols=NUM_COLUMNS,
    )
    for panel, (title, bars) in zip(axes.flat, panels.items(), strict=False):
        _draw_bars(panel, title, bars)
    for unused in axes.flat[len(panels) :]:
        unused.set_axis_off()
    add_legend(figure, axes.flat[0])
    return figure


def _source(study: Study, results: Results) -> str:
    return memory_source(study, (run.memory for run in results.manifests.values()))


def _measured(study: Study, results: Results, model: str) -> list[Bar]:
    memories = {arm: results.memory_of(model, arm) for arm in study.arms}
    return [Bar(arm, it.predicted_gib, it.measured_gib) for arm, it in memories.items() if it]


def _qwen3(name: str) -> list[Bar]:
    config = json.loads((ROOT / "experiments" / "models" / f"{name}.json").read_text())
    measured_gib = reported_weights_gib(RECORDS, MACHINE)
    return [
        Bar(arm, predict_weight_memory_gib(config, precision), measured_gib.get((name, recorded)))
        for arm, (precision, recorded) in PRECISIONS.items()
    ]


def _draw_bars(panel: Axes, title: str, bars: list[Bar]) -> None:
    largest = max(bar.length_gib for bar in bars)
    unit, scale = ("GiB", 1.0) if largest >= 1 else ("MiB", float(MIB_PER_GIB))
    positions = np.arange(len(bars))[::-1]
    bf16 = next((bar for bar in bars if bar.arm == "bf16"), None)
    for position, bar in zip(positions, bars, strict=True):
        length, style = scale * bar.length_gib, arm_style(bar.arm)
        is_predicted = bar.measured_gib is None
        panel.barh(
            position,
            length,
            height=0.62,
            color="white" if is_predicted else style.color,
            edgecolor=style.color,
            hatch="////" if is_predicted else "",
        )
        share = ""
        if bf16 is not None and bar is not bf16:
            share = f"  {bar.length_gib / bf16.length_gib - 1:+.1%}"
        panel.annotate(
            f"{length:.2f} {unit}{share}",
            (length, position),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    panel.plot(
        [scale * bar.predicted_gib for bar in bars],
        positions,
        "|",
        color=INK,
        ms=15,
        mew=1.6,
        label="predicted from shapes",
    )
    panel.set(title=title, xlim=(0, 1.42 * scale * largest), xlabel=f"weights ({unit})")
    panel.set_yticks(positions, [arm_style(bar.arm).label for bar in bars])
    panel.grid(visible=False)
    panel.tick_params(axis="y", length=0)
