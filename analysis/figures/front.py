"""The figure of README.

What NVFP4 saves at true size, and what QAT makes of the mismatch and the reward of ten seeds.
"""

from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.collapse.curves import at_highest_rate, draw_band
from analysis.collapse.data import GridData, style_of
from analysis.collapse.survival import WINDOW
from analysis.load import recorded_study
from analysis.style import add_legend, arm_style, new_figure, save_figure
from analysis.tables.front import MACHINE, MODEL, STUDY
from analysis.tables.rows import RowsRecord, engines_of, number, read_servings
from experiments.rl.metric_names import K3_KL, REWARD
from experiments.study.model_config import read_model_config
from experiments.study.schema import ROOT
from qat_core.units import BYTES_PER_GIB

RECORDS = ROOT / "experiments" / "records"
RECORD, BENCHMARKS = RECORDS / STUDY, RECORDS / "benchmarks"
KEYS_AND_VALUES, BYTES_OF_BF16 = 2, 2


def draw(servings: list[RowsRecord], data: GridData) -> Figure:
    """Memory; k3 KL by step; mean reward by step."""
    figure, axes = new_figure(
        "4-bit rollouts: the memory they save, the mismatch they bring, and QAT",
        f"Left: vLLM on one {servings[-1].machine}. Middle and right: SmolLM2-135M, "
        f"{len(data.study.seeds)} seeds, mean over {WINDOW} steps;\nline: mean over seeds "
        "(geometric of k3 KL), band: its 95 % interval. Rewards are of an arm's own rollouts.",
        height_inches=3.5,
        ncols=3,
        gridspec_kw={"width_ratios": (1.0, 1.1, 1.1)},
    )
    memory, mismatch, reward = axes[0]
    _draw_memory(memory, servings)
    for setting in at_highest_rate(data):
        if setting.correction == "none":
            draw_band(mismatch, data.series(setting, K3_KL), style_of(setting), is_log=True)
            draw_band(reward, data.series(setting, REWARD), style_of(setting), is_log=False)
    mismatch.set(title="Mismatch", ylabel="k3 KL (nats a token)", yscale="log")
    reward.set(title="Mean reward", ylim=(0, 1))
    for panel in (mismatch, reward):
        panel.set(xlabel="training step", xlim=(0, data.study.rl.steps))
    mismatch.minorticks_off()
    add_legend(figure, reward)
    return figure


def _draw_memory(panel: Axes, servings: list[RowsRecord]) -> None:
    """Weights and KV cache of one GPU, a bar a precision."""
    config = read_model_config(ROOT / "experiments" / "models" / f"{MODEL}.json", "")
    heads_of_layers = config["num_hidden_layers"] * config["num_key_value_heads"]
    token_bytes = KEYS_AND_VALUES * BYTES_OF_BF16 * heads_of_layers * config["head_dim"]
    engines = engines_of(servings)
    for position, (precision, arm) in enumerate((("bf16", "bf16"), ("nvfp4", "nvfp4-qat"))):
        engine, color = engines[f"{MODEL}:{precision}"], arm_style(arm).color
        weight_gib, tokens = number(engine, "weight_gib"), number(engine, "kv_cache_tokens")
        cache_gib = tokens * token_bytes / BYTES_PER_GIB
        panel.bar(position, weight_gib, 0.7, color=color)
        panel.bar(position, cache_gib, 0.7, bottom=weight_gib, color=color, alpha=0.3)
        weights = f"weights\n{weight_gib:.1f} GiB"
        cache = f"KV cache\n{tokens / 1e6:.2f} million\ntokens"
        center: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "linespacing": 1.0}
        panel.text(position, weight_gib / 2, weights, color="white", **center)
        panel.text(position, weight_gib + cache_gib / 2, cache, **center)
    panel.set(title="Qwen3-30B-A3B", ylabel="GPU memory (GiB)")
    panel.set_xticks((0, 1), ("BF16", "NVFP4"))
    panel.grid(visible=False)


def draw_front() -> None:
    """Writes the figure next to the benchmarks' records."""
    servings = read_servings(BENCHMARKS, MACHINE)
    data = GridData(recorded_study(RECORD), RECORD)
    save_figure(partial(draw, servings, data), BENCHMARKS / "figures" / "front.png")
