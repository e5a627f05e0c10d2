"""Speed of the NVFP4 codec on one GPU against a device-to-device copy, and against verl's kernel.

    python -m experiments.benchmarks.codec experiments/records/benchmarks/codec_h200.json

A copy moves 4 bytes a weight (2 read, 2 written); every time is divided by the copy's of the same
weights in the same run. Kernels are timed inside CUDA graphs over several tensors, together larger
than the L2 cache: device time, without launch overhead. Whole models are timed by wall clock.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench_cudagraph

from experiments.provenance import hardware, versions
from qat_core.nvfp4 import dequantize, fake_quantize, global_scale, group_amax, quantize

SHAPE = (12288, 4096)
TENSORS = 4  # of 96 MiB in BF16
ROUNDS = 50
# Goals as shares of the copy's time; the bytes moved allow 1.0, 0.5, 0.64 and 0.64.
GOALS = {"fake_quantize": 1.10, "group_amax": 0.60, "quantize": 0.75, "dequantize": 0.75}

HIDDEN_8B, KV_8B, FFN_8B = 4096, 1024, 12288
LAYER_8B = [
    [(HIDDEN_8B, HIDDEN_8B), (KV_8B, HIDDEN_8B), (KV_8B, HIDDEN_8B)],
    [(HIDDEN_8B, HIDDEN_8B)],
    [(FFN_8B, HIDDEN_8B), (FFN_8B, HIDDEN_8B)],
    [(HIDDEN_8B, FFN_8B)],
]
LAYER_30B: list[list[tuple[int, ...]]] = [
    [(4096, 2048), (512, 2048), (512, 2048)],
    [(2048, 4096)],
    [(128, 1536, 2048)],
    [(128, 2048, 768)],
]
LAYERS_30B = 48
NANO_LAYERS = 4
LAYER_NANO = [
    [(128, 128), (64, 128), (64, 128)],
    [(128, 128)],
    [(256, 128), (256, 128)],
    [(128, 256)],
]
GROUPS_OF = "groups of q/k/v, o, gate/up, down"


def random_groups(shapes: Sequence[Sequence[tuple[int, ...]]], device: str) -> list[list[Tensor]]:
    """BF16 weights of one layer, by group."""
    return [
        [torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02 for shape in members]
        for members in shapes
    ]


def verl_linear() -> ModuleType | None:
    """verl's QAT module, loaded from its file: importing verl itself would need Ray."""
    package = importlib.util.find_spec("verl")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0], "utils", "qat", "linear.py")
    spec = importlib.util.spec_from_file_location("verl_qat_linear", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernel_calls() -> dict[str, Callable[[], object]]:
    """What to time: each call works through all tensors once."""
    weights = [torch.randn(SHAPE, device="cuda").bfloat16() * 0.02 for _ in range(TENSORS)]
    copies = [torch.empty_like(w) for w in weights]
    amax = [group_amax([[w]])[0] for w in weights]
    scales = {p: [global_scale(a, p) for a in amax] for p in ("pow2", "amax")}
    packed = [quantize(w, g) for w, g in zip(weights, scales["pow2"], strict=True)]
    pairs = list(zip(weights, scales["pow2"], strict=True))
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: [c.copy_(w) for c, w in zip(copies, weights, strict=True)],
        "fake_quantize": lambda: [fake_quantize(w, g) for w, g in pairs],
        "fake_quantize, amax policy": lambda: [
            fake_quantize(w, g) for w, g in zip(weights, scales["amax"], strict=True)
        ],
        "fake_quantize, four_over_six": lambda: [
            fake_quantize(w, g, "four_over_six") for w, g in pairs
        ],
        "fake_quantize, mse": lambda: [fake_quantize(w, g, "mse") for w, g in pairs],
        "group_amax": lambda: group_amax([[w] for w in weights]),
        "quantize": lambda: [quantize(w, g) for w, g in pairs],
        "dequantize": lambda: [dequantize(p) for p in packed],
        "torch abs().max()": lambda: [w.abs().max() for w in weights],
    }
    if verl := verl_linear():
        calls["verl fake quantize, scale known"] = lambda: [
            verl.fp4_fake_quant_weight(w, a) for w, a in zip(weights, amax, strict=True)
        ]
    return calls


def time_kernels() -> list[dict[str, Any]]:
    """Median and quartile times of each call a tensor, and their ratio to the copy's."""
    rows = []
    for name, call in kernel_calls().items():
        times_ms = do_bench_cudagraph(call, rep=200, return_mode="all")
        times_us = torch.tensor(times_ms) * 1e3 / TENSORS
        low, mid, high = torch.quantile(times_us, torch.tensor([0.25, 0.5, 0.75])).tolist()
        rows.append({"call": name, "median_us": mid, "quartiles_us": [low, high]})
    copy_us = rows[0]["median_us"]
    for row in rows:
        row["of_copy"] = row["median_us"] / copy_us
        row["goal"] = GOALS.get(row["call"])
    return rows


def wall_ms(call: Callable[[], object], device: str = "cuda", rounds: int = ROUNDS) -> list[float]:
    """Lower quartile, median and upper quartile of the wall time, the device idle before and after.

    One call goes unmeasured.
    """
    times = []
    for _ in range(rounds + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((perf_counter() - start) * 1e3)
    return torch.quantile(torch.tensor(times[1:]), torch.tensor([0.25, 0.5, 0.75])).tolist()


def kernel_launches(call: Callable[[], object]) -> dict[str, int]:
    """Kernels and memory operations that one call puts on the GPU, by name."""
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return {event.key: event.count for event in trace.key_averages()}


def time_layer_8b() -> dict[str, Any]:
    """Group amax of all weights of a Qwen3-8B layer: launches and time."""
    groups = random_groups(LAYER_8B, "cuda")
    flat = [w for members in groups for w in members]
    copies = [torch.empty_like(w) for w in flat]
    amax_ms = do_bench_cudagraph(lambda: group_amax(groups), rep=200, return_mode="median")
    copy_ms = do_bench_cudagraph(
        lambda: [c.copy_(w) for c, w in zip(copies, flat, strict=True)], return_mode="median"
    )
    return {
        "groups": GROUPS_OF,
        "amax_us": amax_ms * 1e3,
        "of_copy": amax_ms / copy_ms,
        "launches": kernel_launches(lambda: group_amax(groups)),
    }


def time_model_30b() -> dict[str, Any]:
    """All NVFP4 weights of a Qwen3-30B-A3B packed on the GPU, one layer's result dropped never."""
    layers = [random_groups(LAYER_30B, "cuda") for _ in range(LAYERS_30B)]
    groups = [members for layer in layers for members in layer]
    amax = group_amax(groups)
    pairs = [
        (w, global_scale(values))
        for members, values in zip(groups, amax, strict=True)
        for w in members
    ]
    packed = [quantize(w, g) for w, g in pairs]
    read, written = sum(w.nbytes for w, _ in pairs), sum(p.nbytes for p in packed)
    del packed
    return {
        "read_gib": read / 2**30,
        "written_gib": written / 2**30,
        "pack_ms": wall_ms(lambda: [quantize(w, g) for w, g in pairs], rounds=10),
        "amax_ms": wall_ms(lambda: group_amax(groups), rounds=10),
    }


def time_nano(device: str) -> dict[str, Any]:
    """Fake quantization of every weight of a nano model, as one forward pass does it."""
    groups = [members for _ in range(NANO_LAYERS) for members in random_groups(LAYER_NANO, device)]
    amax = group_amax(groups)
    pairs = [
        (w, global_scale(values))
        for members, values in zip(groups, amax, strict=True)
        for w in members
    ]

    def forward() -> list[Tensor]:
        return [fake_quantize(w, g) for w, g in pairs]

    result: dict[str, Any] = {
        "device": device,
        "weights": len(pairs),
        "fake_quantize_ms": wall_ms(forward, device),
        "amax_ms": wall_ms(lambda: group_amax(groups), device),
    }
    if device == "cuda":
        result["fake_quantize_graph_ms"] = do_bench_cudagraph(forward, return_mode="median")
    return result


def print_table(rows: list[dict[str, Any]]) -> None:
    """The kernels' times, ratios and goals."""
    table = Table("call", "us", "of the copy's time", "goal", title=f"{SHAPE} BF16")
    for row in rows:
        goal = f"{row['goal']:.2f}" if row["goal"] else ""
        table.add_row(row["call"], f"{row['median_us']:.1f}", f"{row['of_copy']:.2f}", goal)
    Console().print(table)


def main() -> None:
    """Measures, prints a table and writes the record to the path given."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    if not torch.cuda.is_available():
        raise SystemExit("codec benchmark: needs a CUDA GPU")
    torch.set_num_threads(1)
    rows = time_kernels()
    print_table(rows)
    record = {
        "benchmark": "codec",
        "hardware": hardware("cuda"),
        "versions": versions(),
        "shape": SHAPE,
        "tensors": TENSORS,
        "copy_tb_per_s": 4e-6 * SHAPE[0] * SHAPE[1] / rows[0]["median_us"],
        "verl": "measured" if verl_linear() else "not installed, not measured",
        "kernels": rows,
        "qwen3_8b_layer": time_layer_8b(),
        "nano": [time_nano("cuda"), time_nano("cpu")],
        "qwen3_30b_a3b": time_model_30b(),
    }
    Console().print_json(data={k: v for k, v in record.items() if k != "kernels"})
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
