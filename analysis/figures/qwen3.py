"""Figures of Qwen3 at true size in vLLM: weights and KV cache, and the rollouts of a step.

They are drawn from the records of experiments/benchmarks.
"""

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.style import arm_style, name_rows, new_figure, write_at
from analysis.tables.memory import CACHE, MODELS
from analysis.tables.rows import Engines, RowsRecord, engines_of, number
from experiments.benchmarks.engine_tables import PROMPTS, engine_name

# of a precision, whose colour it has; NVFP4 first with vLLM's own kernels, Marlin
ARM_OF = {
    "bf16": "bf16",
    "nvfp4": "nvfp4-qat",
    "humming-experts": "nvfp4-qat",
    "humming": "nvfp4-qat",
}
HATCHES = {"humming-experts": "..", "humming": "//"}
PLAIN = ("bf16", "nvfp4")  # Humming holds the same


def draw_memory(records: Sequence[RowsRecord]) -> Figure:
    """Weights and KV cache, a bar an engine."""
    engines = _side_by_side(records, PLAIN)
    figure, axes = new_figure(
        "Qwen3 at true size in vLLM: weights and KV cache",
        f"{_setup(records)}\n"
        "Weights: as vLLM reports them. KV cache: in BF16, in what they leave. Percentages: change "
        "from BF16.",
        height_inches=2.9,
        has_legend=False,
        ncols=2,
        sharey=True,
    )
    weights, cache = axes[0]
    _draw_bars(
        weights, {name: number(it, "weight_gib") for name, it in engines.items()}, "{:.1f} GiB"
    )
    weights.set(title="Weights", xlabel="weights (GiB)")
    tokens = {name: number(it, CACHE) / 1e6 for name, it in engines.items()}
    _draw_bars(cache, tokens, "{:.2f} million")
    cache.set(title="KV cache", xlabel="KV cache (million tokens)")
    return figure


def draw_rollouts(records: Sequence[RowsRecord]) -> Figure:
    """Seconds of a step's rollouts, a panel for each number of prompts and a bar an engine."""
    engines = _side_by_side(records, ARM_OF)
    figure, axes = new_figure(
        "Qwen3 at true size in vLLM: rollouts of a training step",
        f"{_setup(records)}\n"
        "Up to 2,048 new tokens a prompt. NVFP4 by Marlin, or Humming where named. Percentages: "
        "change from BF16 in the same run.",
        height_inches=3.4,
        has_legend=False,
        ncols=len(PROMPTS),
        sharey=True,
    )
    for panel, count in zip(axes[0], PROMPTS, strict=True):
        key = f"rollouts.{count}.seconds"
        seconds = {name: number(it, key) for name, it in engines.items() if it.get(key)}
        _draw_bars(panel, seconds, "{:.1f} s")
        panel.set(title=f"{count:,} prompts", xlabel="rollouts (s)")
    return figure


def _setup(records: Sequence[RowsRecord]) -> str:
    newest = records[-1]
    return (
        f"Measured in vLLM {newest.versions['vllm']}, which takes "
        f"{number(newest.settings, 'gpu_memory_utilization'):.0%} of one {newest.machine}; "
        "random weights."
    )


def _side_by_side(records: Sequence[RowsRecord], precisions: Iterable[str]) -> Engines:
    engines = engines_of(records)
    names = [f"{model}:{precision}" for model in MODELS for precision in precisions]
    return {it: engines[it] for it in names if it in engines}


def _draw_bars(panel: Axes, lengths: Mapping[str, float], text: str) -> None:
    for position, (name, length) in enumerate(lengths.items()):
        model, _, precision = name.partition(":")
        hatch = HATCHES.get(precision, "")
        color = arm_style(ARM_OF[precision]).color
        panel.barh(position, length, height=0.62, color=color, hatch=hatch, edgecolor="white")
        share = length / lengths[f"{model}:bf16"] - 1
        shown = text.format(length) + ("" if precision == "bf16" else f"  {share:+.1%}")
        write_at(panel, shown, length, position)
    name_rows(panel, [engine_name(name) for name in lengths])
    panel.set_xlim(0, 1.6 * max(lengths.values()))
    panel.grid(visible=False)
    panel.tick_params(axis="y", length=0)
