"""Figure: offline accuracy before and after training, every arm in both precisions."""

from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.claims import BOOTSTRAP_SEED
from analysis.load import Results
from analysis.stats import Interval, mean_over_prompts
from analysis.style import FAINT, add_legend, arm_style, new_figure
from experiments.schema import Study

CAPTION = "Offline accuracy of the base model and of every arm, evaluated in BF16 and in NVFP4"
NEUTRAL = "#444444"
DECODINGS = ("greedy", "sampled")
PRECISIONS = {"bf16": ("evaluated in BF16", "o", -0.13), "nvfp4": ("evaluated in NVFP4", "D", 0.13)}


def draw(study: Study, results: Results) -> Figure:
    """A column a model, a row a decoding; a pair of points an arm."""
    figure, axes = new_figure(
        "Offline accuracy on held-out prompts",
        "Points: mean over seeds and prompts; bars: 95 % bootstrap interval over both. "
        "Dashed: base model in BF16.",
        height_inches=5.2,
        nrows=len(DECODINGS),
        ncols=len(study.models),
        sharex=True,
        sharey=True,
    )
    for row, decoding in zip(axes, DECODINGS, strict=True):
        row[0].set_ylabel(f"accuracy, {decoding}")
        for panel, model in zip(row, study.models, strict=True):
            _draw_panel(panel, study, results, model, decoding)
    for panel, model in zip(axes[0], study.models, strict=True):
        panel.set_title(model)
    add_legend(figure, axes[0][0])
    return figure


def _draw_panel(panel: Axes, study: Study, results: Results, model: str, decoding: str) -> None:
    columns = list(_columns(study))
    for precision, (label, marker, shift) in PRECISIONS.items():
        for position, (arm, base, _, color) in enumerate(columns):
            rates_SP = results.success_rates(model, arm, precision, decoding, base=base)
            interval = mean_over_prompts(rates_SP, np.random.default_rng(BOOTSTRAP_SEED))
            fill = _fill(color, precision == "bf16")
            _draw_point(panel, position + shift, interval, marker, color, fill)
            if base and precision == "bf16":
                panel.axhline(interval.estimate, color=FAINT, linestyle="--", linewidth=1)
        fill = _fill(NEUTRAL, precision == "bf16")
        panel.plot([], [], marker, color=NEUTRAL, markerfacecolor=fill, label=label)
    panel.set_xticks(range(len(columns)), [label for *_, label, _ in columns])
    panel.tick_params(axis="x", labelsize=8.5)
    panel.grid(axis="x", visible=False)


def _columns(study: Study) -> Iterator[tuple[str, bool, str, str]]:
    """Arm, whether before training, tick label and colour of each column."""
    yield study.arms[0], True, "base\nmodel", NEUTRAL
    for arm in study.arms:
        style = arm_style(arm)
        yield arm, False, style.label.replace(", ", ",\n"), style.color


def _draw_point(
    panel: Axes, x: float, interval: Interval, marker: str, color: str, fill: str
) -> None:
    below, above = interval.estimate - interval.low, interval.high - interval.estimate
    panel.errorbar(
        x,
        interval.estimate,
        yerr=[[below], [above]],
        fmt=marker,
        color=color,
        markerfacecolor=fill,
        markersize=6,
        capsize=2.5,
    )


def _fill(color: str, filled: bool) -> str:
    return color if filled else "white"
