"""Figure `qwen3_memory`: Qwen3 at true size in vLLM, weights and the KV cache beside them.

`python -m analysis.figures.qwen3 --out DIR` draws it from the records of experiments/benchmarks.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.figure_files import FORMATS
from analysis.style import arm_style, new_figure, save_figure
from analysis.tables.engines import engine_name
from analysis.tables.serving import ServingRecord, newest_served, read_servings
from experiments.study.schema import ROOT
from experiments.support.cli import run_cli

NAME = "qwen3_memory"
CAPTION = "Weights of Qwen3 in vLLM, and the tokens that its KV cache holds beside them"
RECORDS = ROOT / "experiments" / "records" / "benchmarks"
MACHINE = "h200"
MODELS = ("qwen3-8b", "qwen3-30b-a3b")
ARM_OF = {"bf16": "bf16", "nvfp4": "nvfp4-qat"}  # of a precision, whose colour it has


def draw(records: Sequence[ServingRecord]) -> Figure:
    """Weights and KV cache, a bar an engine, as it was measured last."""
    newest, record = newest_served(records), records[-1]
    engines = {
        (model, precision): newest[f"{model}:{precision}"]
        for model in MODELS
        for precision in ARM_OF
    }
    figure, axes = new_figure(
        "Qwen3 at true size in vLLM: weights and KV cache",
        f"Measured in vLLM {record.versions['vllm']}, which takes "
        f"{record.gpu_memory_utilization:.0%} of one {record.hardware.name}; random weights.\n"
        "Weights: as vLLM reports them. KV cache: in BF16, in what they leave. Percentages: change "
        "from BF16.",
        height_inches=2.9,
        has_legend=False,
        ncols=2,
        sharey=True,
    )
    weights, cache = axes[0]
    _draw_bars(weights, {name: it.weight_gib for name, it in engines.items()}, "{:.1f} GiB")
    weights.set(title="Weights", xlabel="weights (GiB)")
    tokens = {name: it.kv_cache_tokens / 1e6 for name, it in engines.items()}
    _draw_bars(cache, tokens, "{:.2f} million")
    cache.set(title="KV cache", xlabel="KV cache (million tokens)")
    return figure


def _draw_bars(panel: Axes, lengths: Mapping[tuple[str, str], float], number: str) -> None:
    for position, ((model, precision), length) in enumerate(lengths.items()):
        panel.barh(position, length, height=0.62, color=arm_style(ARM_OF[precision]).color)
        share = length / lengths[model, "bf16"] - 1
        panel.annotate(
            number.format(length) + ("" if precision == "bf16" else f"  {share:+.1%}"),
            (length, position),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    panel.set_yticks(range(len(lengths)), [engine_name(":".join(name)) for name in lengths])
    panel.set(xlim=(0, 1.6 * max(lengths.values())), ylim=(len(lengths) - 0.5, -0.5))
    panel.grid(visible=False)
    panel.tick_params(axis="y", length=0)


def main() -> None:
    """Writes a PNG and an SVG."""
    parser = argparse.ArgumentParser(description="Draw memory of Qwen3 in vLLM.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the PNG and SVG files")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{NAME}.{kind}" for kind in FORMATS]
    save_figure(partial(draw, read_servings(RECORDS, MACHINE)), *paths)


if __name__ == "__main__":
    run_cli(main)
