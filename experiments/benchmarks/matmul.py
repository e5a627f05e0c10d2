"""How fast is an NVFP4 weight multiplied on a GPU, and how far from the machine's limits?

    python -m experiments.benchmarks.matmul RECORD.json [--layers KEY ...] [--tokens M ...]

All layers of Qwen3-8B and Qwen3-30B-A3B: vLLM's Marlin, humming-kernels with three tilings, our own
Triton kernel, unpacking and cuBLAS, against BF16. Times are of CUDA graphs, so without launch
overhead; arms take turns; each call reads weights that are not in the L2 cache. Next to them stands
what no kernel undercuts at the bandwidth and the peak measured in the same run. Every output is
compared with FP64. What the record has already is kept: run again, at the same commit and on the
same machine, to add layers or tokens.
`--device cpu` rehearses with small layers and the arms that need no GPU.
"""

import argparse
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.device import require_device
from experiments.benchmarks.products.cases import (
    Call,
    Weights,
    case,
    equal_groups,
    prepare,
    relative_error,
)
from experiments.benchmarks.products.dense import ARMS as DENSE_ARMS
from experiments.benchmarks.products.experts import ARMS as EXPERT_ARMS
from experiments.benchmarks.products.layers import MODELS, Layer, floors_us, layers_of
from experiments.benchmarks.records import read_continued
from experiments.benchmarks.timing import quartiles, time_calls
from experiments.runs.provenance import origin
from experiments.support.cli import run_cli
from experiments.support.json_files import write_json
from qat_core.arguments import positive_int
from qat_core.nvfp4 import group_amax

TOKENS = [1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
CPU_LAYERS = [
    Layer("tiny", "qkv", 96, 64),
    Layer("tiny", "gate_up", 64, 64, experts=8, experts_per_token=2),
    Layer("tiny", "down", 64, 32, experts=8, experts_per_token=2, rows_per_token=2),
]
CPU_ARMS = ("bf16", "dequantize + bf16", "grouped bf16", "dequantize + grouped bf16")
# Tokens whose activations push a weight out of the L2 cache, but for small packed ones.
FILLS_CACHE = 1024
# Rounding an exact result to BF16 alone costs up to 2**-8 = 3.9e-3 of a value and 1.7e-3 in the
# root mean square (measured on a CPU); sums in FP32 add little. A lost block scale costs far more.
MAX_ERROR = 3e-3


def layers(device: str, chosen: Sequence[str] | None) -> list[Layer]:
    """What there is to measure, or what is chosen of it by name.

    Raises:
        ValueError: there is no layer of that name.
    """
    gpu_layers = [layer for model in MODELS for layer in layers_of(model)]
    known = {layer.key: layer for layer in (CPU_LAYERS if device == "cpu" else gpu_layers)}
    for name in chosen or ():
        if name not in known:
            raise ValueError(f"--layers: {name}: no such layer; there are {', '.join(known)}")
    return [layer for name, layer in known.items() if chosen is None or name in chosen]


def arms_of(layer: Layer, device: str) -> list[str]:
    """The ways to multiply that can be measured there."""
    arms = list(EXPERT_ARMS if layer.experts else DENSE_ARMS)
    return [arm for arm in arms if device == "cuda" or arm in CPU_ARMS]


def measure_peak(device: str) -> dict[str, float]:
    """Bytes a second, the better of a copy and a read, and FLOPs a second of a BF16 product."""
    side = 8192 if device == "cuda" else 64
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(8 * side, 2 * side, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    calls: dict[str, list[Call]] = {
        "copy": [lambda: target.copy_(source)],
        "read": [lambda: group_amax([[source]])[0]],
        "product": [lambda: a @ b],
    }
    best = {name: 1e-6 * min(times) for name, times in time_calls(calls, device, 10).items()}
    rates = 2 * source.nbytes / best["copy"], source.nbytes / best["read"]
    return {"bytes_per_s": max(rates), "flops_per_s": 2 * side**3 / best["product"]}


def batches(tokens: int) -> int:
    """How many are routed, so that each call reads other experts' weights than the one before."""
    if tokens >= FILLS_CACHE:
        return 1
    return 16 if tokens == 1 else 4


def measure(
    weights: Weights, tokens: int, device: str, rounds: int, peak: dict[str, float]
) -> dict[str, Any]:
    """Times and errors of all arms at one number of tokens."""
    this = case(weights, tokens, copies=batches(tokens))
    rows, reference = this.reference()
    outputs, refusals = this.outputs()
    calls = {arm: this.calls(arm) for arm in outputs}
    if tokens >= FILLS_CACHE:
        calls = {arm: listed[:2] for arm, listed in calls.items()}
    times = time_calls(calls, device, rounds)
    return {
        "floor_us": floors_us(weights.layer, tokens, this.experts_hit, peak),
        "experts_hit": this.experts_hit,
        "equal_bits": equal_groups(outputs),
        "arms": {
            arm: {"us": quartiles(times[arm]), "error": relative_error(out, rows, reference)}
            for arm, out in outputs.items()
        },
        "refusals": refusals,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Times of one layer, by tokens."""
    arms = list(dict.fromkeys(arm for row in rows for arm in row["arms"]))
    table = Table("tokens", "floor nvfp4", "floor bf16", *arms, title=f"{rows[0]['layer']}, us")
    for row in rows:
        floors = [f"{row['floor_us'][kind]:.1f}" for kind in ("nvfp4", "bf16")]
        found = [row["arms"].get(arm) for arm in arms]
        times = [f"{figures['us'][1]:.1f}" if figures else "refused" for figures in found]
        table.add_row(str(row["tokens"]), *floors, *times)
    Console(width=160).print(table)


def main() -> None:
    """Measures what the record lacks and writes it after each layer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--layers", nargs="+", metavar="MODEL.NAME")
    parser.add_argument("--tokens", nargs="+", type=positive_int, default=TOKENS)
    parser.add_argument("--rounds", type=positive_int, default=20)
    arguments = parser.parse_args()
    device = arguments.device
    require_device(device)
    chosen = layers(device, arguments.layers)
    torch.manual_seed(0)
    setup = {
        "benchmark": "matmul",
        **origin(device, arguments.record),
        "rounds": arguments.rounds,
    }
    record = read_continued(arguments.record, setup) or {
        **setup,
        "peak": measure_peak(device),
        "cases": [],
    }
    for layer in chosen:
        if rows := measure_missing(record, layer, arguments.tokens, device):
            record["cases"] += rows
            write_json(arguments.record, record)
    if wrong := list(wrong_results(record["cases"])):
        raise SystemExit("\n".join(wrong))


def missing_tokens(record: dict[str, Any], layer: Layer, tokens: list[int]) -> list[int]:
    """The numbers of tokens at which a record lacks a layer."""
    known = {row["tokens"] for row in record["cases"] if row["layer"] == layer.key}
    return [count for count in tokens if count not in known]


def measure_missing(
    record: dict[str, Any], layer: Layer, tokens: list[int], device: str
) -> list[dict[str, Any]]:
    """The cases of a layer that a record lacks."""
    missing = missing_tokens(record, layer, tokens)
    if not missing:
        return []
    weights = prepare(layer, arms_of(layer, device), missing, device, cold=device == "cuda")
    rows = []
    for count in missing:
        figures = measure(weights, count, device, record["rounds"], record["peak"])
        rows.append({"layer": layer.key, "tokens": count, **figures})
        gc.collect()
    print_table(rows)
    del weights
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def wrong_results(cases: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each arm that is further off than roundings are, or that refused."""
    for row in cases:
        where = f"{row['layer']} at {row['tokens']}"
        for arm, figures in row["arms"].items():
            if not figures["error"] <= MAX_ERROR:
                yield f"{where}: {arm} is off by {figures['error']:.1e}"
        for arm, message in row["refusals"].items():
            yield f"{where}: {arm} refuses: {message}"


if __name__ == "__main__":
    run_cli(main)
