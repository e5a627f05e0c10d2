"""Speed of the NVFP4 codec on one GPU against a device-to-device copy, and against verl's kernel.

A copy moves 4 bytes a weight (2 read, 2 written); every time is divided by the copy's of the same
weights in the same run. Kernels are timed inside CUDA graphs over several tensors, together larger
than the L2 cache.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from triton.testing import do_bench_cudagraph

from experiments.benchmarks.qat_layers import arms, verl_qat
from experiments.benchmarks.records import Column, Row, shape_of
from experiments.benchmarks.timing import quartiles
from experiments.runs.provenance import origin
from experiments.support.gpu_locks import require_device
from experiments.support.json_files import write_json
from qat_core.nvfp4 import (
    ShardLayout,
    dequantize,
    fake_quantize,
    global_scale,
    group_amax,
    pack_shards,
    quantize,
    shard_layout,
    unpack_shards,
)

SHAPE = (12288, 4096)
TENSORS = 4  # of 96 MiB in BF16
# As shares of the copy's time.
GOALS = {
    "fake_quantize": 1.10,
    "group_amax": 0.60,
    "quantize": 0.75,
    "dequantize": 0.75,
    "unpack_shards, two": 0.75,
}
COLUMNS = {
    "call": Column(heading="Kernel"),
    "us": Column(heading="us", format=".1f"),
    "of_copy": Column(heading="of a copy's time", format=".2f"),
    "goal": Column(heading="Goal", format=".2f", bounds="of_copy"),
}


def kernel_calls() -> dict[str, Callable[[], object]]:
    """What to time: each call works through all tensors once."""
    weights = [torch.randn(SHAPE, device="cuda").bfloat16() * 0.02 for _ in range(TENSORS)]
    copies = [torch.empty_like(w) for w in weights]
    amax = [group_amax([[w]])[0] for w in weights]
    scales = {p: [global_scale(a, p) for a in amax] for p in ("pow2", "amax")}
    packed = [quantize(w, g) for w, g in zip(weights, scales["pow2"], strict=True)]
    half = shard_layout(torch.Size(SHAPE), SHAPE[0] // 2)
    shards = [_two_shards(w, g, half) for w, g in zip(weights, scales["pow2"], strict=True)]
    pairs = list(zip(weights, scales["pow2"], strict=True))

    def unpack_all() -> None:
        for both, g, copy in zip(shards, scales["pow2"], copies, strict=True):
            unpack_shards(both, half, g, copy)

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
        "quantize, mse": lambda: [quantize(w, g, "mse") for w, g in pairs],
        "dequantize": lambda: [dequantize(p) for p in packed],
        "unpack_shards, two": unpack_all,
        "verl's amax": lambda: [w.abs().max() for w in weights],
    }
    if "verl" in arms():
        verl = verl_qat("linear")
        calls["verl fake quantize, scale known"] = lambda: [
            verl.fp4_fake_quant_weight(w, a) for w, a in zip(weights, amax, strict=True)
        ]
    return calls


def _two_shards(w: Tensor, g: Tensor, half: ShardLayout) -> Tensor:
    """The buffers of two ranks, as an all-gather brings them."""
    rows = torch.split(w, half.num_rows)
    return torch.cat(pack_shards(rows, [g, g], [half, half], names=["w", "w"]))


def time_kernels() -> list[Row]:
    """Time of each call a tensor, and its ratio to the copy's; quartiles."""
    rows: list[Row] = []
    copy_us = 0.0
    for name, call in kernel_calls().items():
        times_ms = do_bench_cudagraph(call, rep=200, return_mode="all")
        us = quartiles([ms * 1e3 / TENSORS for ms in times_ms])
        copy_us = copy_us or us[1]
        of_copy = us[1] / copy_us
        rows.append({"call": name, "us": us, "of_copy": of_copy, "goal": GOALS.get(name)})
    return rows


def main(arguments: argparse.Namespace) -> None:
    """Measures, and writes the record to the path given."""
    record_path: Path = arguments.record
    require_device("cuda")
    torch.set_num_threads(1)
    rows = time_kernels()
    copy_us = rows[0]["us"]
    assert isinstance(copy_us, list)
    settings: dict[str, str | int | float] = {
        "BF16 matrices": " x ".join(map(str, SHAPE)),
        "tensors": TENSORS,
        "TB/s of a copy": 4e-6 * SHAPE[0] * SHAPE[1] / copy_us[1],
        "verl": "measured" if "verl" in arms() else "not installed, not measured",
    }
    record = {"benchmark": "codec", **origin("cuda"), **shape_of(settings, COLUMNS), "rows": rows}
    Console().print_json(data=record)
    record_path.parent.mkdir(parents=True, exist_ok=True)
    write_json(record_path, record)
