"""Exact products of NVFP4 weights: ours, Humming's or cuBLAS of the unpacked weight, against BF16.

    python -m experiments.benchmarks exact_products RECORD.json

Of each linear layer and of one layer's experts, by rows or tokens: CUDA graphs, arms in turns, with
weights that are not in the L2 cache. What is served at how many rows stands in
`qat_core/rollout/vllm/humming/tiles.py`; here every way is timed, and its bits are compared with
cuBLAS that splits no sum, those of experts with PyTorch's grouped product.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from experiments.benchmarks.architectures import read_architecture
from experiments.benchmarks.records import Column, Row, shape_of
from experiments.benchmarks.timing import allow_split_sums, quartiles, time_calls
from experiments.runs.provenance import origin
from experiments.support.device import require_device
from experiments.support.json_files import write_json
from qat_core.exact.functions import linear
from qat_core.exact.operators import forbid_split_sums
from qat_core.exact.slices import shared_linear, slices_of
from qat_core.nvfp4 import dequantize, global_scale, group_amax, quantize
from qat_core.rollout.vllm.switches import EXACT_VARIABLE
from qat_core.rollout.vllm.tile_layout import to_layout, unpack

SHAPES = ("qwen3-8b", "qwen3-30b-a3b")
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
ROUNDS = 10
COLD_BYTES = 160e6  # of weights between two uses of one, more than the L2 cache has
ARMS = {"bf16": "BF16", "ours": "Ours", "unpacked": "Unpacked", "humming": "Batch-invariant"}
COLUMNS = {
    "shape": Column(heading="Shape"),
    "layer": Column(heading="Layer"),
    "rows": Column(heading="Rows or tokens", format=","),
    **{f"us.{arm}": Column(heading=f"{it}, us", format=".1f") for arm, it in ARMS.items()},
    "unequal": Column(heading="Unequal", format=","),
}
NOTE = (
    "Medians, in brackets quartiles. Unequal: numbers of all ways that differ in any bit from "
    "cuBLAS without split sums, of experts from PyTorch's grouped product. BF16 of linear layers: "
    "cuBLAS as it is by default."
)
Packed = tuple[Tensor, Tensor, Tensor]  # words, scale, multiplier: see `tile_layout.unpack`
Calls = dict[str, list[Callable[[], Tensor]]]


def layer_sizes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(N, K) of the products of a decoder layer by name; those of experts begin so."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
    is_moe = "num_experts" in config
    inner = config["moe_intermediate_size" if is_moe else "intermediate_size"]
    prefix = "experts " if is_moe else ""
    return {
        "qkv": ((queries + 2 * keys) * head, hidden),
        "o": (hidden, queries * head),
        f"{prefix}gate_up": (2 * inner, hidden),
        f"{prefix}down": (hidden, inner),
    }


def random_packed(*shape: int) -> tuple[Packed, Tensor]:
    """A weight in Humming's layout, and its BF16 value."""
    weight = 0.02 * torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    packed = quantize(weight, global_scale(group_amax([[weight]])[0], "pow2"))
    multiplier = packed.global_scale.reciprocal().expand(len(weight) if len(shape) == 3 else 1)
    laid_out = to_layout(packed.codes, packed.block_scale)
    return (*laid_out, multiplier.contiguous()), dequantize(packed)


def linear_calls(n: int, k: int, rows: int, is_shared: bool) -> tuple[Calls, Tensor]:
    """What is timed of a linear layer, and the expected bits; shared: see `exact.slices`."""
    from qat_core.rollout.vllm.humming import few_rows

    packed, weight = random_packed(n, k)
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    all_packed = [
        tuple(it.clone() for it in packed) for _ in range(1 + int(COLD_BYTES / packed[0].nbytes))
    ]
    weights = [weight.clone() for _ in range(1 + int(COLD_BYTES / weight.nbytes))]

    def bf16(held: Tensor) -> Tensor:
        allow_split_sums()
        return F.linear(x, held)

    def unpacked(*held: Tensor) -> Tensor:
        forbid_split_sums()
        return product(x, unpack(*held))

    product, slices = (shared_linear, slices_of(n, k)) if is_shared else (linear, 1)
    ours = partial(few_rows.multiply, x, slices=slices)
    forbid_split_sums()
    expected = product(x, weight)
    return {
        "bf16": [partial(bf16, it) for it in weights],
        "ours": [partial(ours, *it) for it in all_packed],
        "unpacked": [partial(unpacked, *it) for it in all_packed],
    }, expected


def expert_calls(n: int, k: int, tokens: int, config: Mapping[str, Any]) -> tuple[Calls, Tensor]:
    """What is timed of a layer's experts, and the expected bits."""
    from qat_core.rollout.vllm.humming import experts, few_rows

    count, top_k = config["num_experts"], config["num_experts_per_tok"]
    packed, weight = random_packed(count, n, k)
    pairs, is_first = tokens * top_k, k == config["hidden_size"]
    x = torch.randn(tokens if is_first else pairs, k, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, count, device="cuda").topk(top_k).indices.int()
    routing = experts._Routing(ids, count, None)
    tile = few_rows.tile_rows(pairs, count)

    def ours() -> Tensor:
        out = x.new_empty(pairs, n)
        few_rows.multiply_experts(x, *packed, tile, routing.order(tile), out)
        return out

    def humming() -> Tensor:
        out = x.new_empty(pairs, n)
        experts.multiply_by_humming(x, *packed, routing, out)
        return out

    order = ids.flatten().argsort(stable=True)
    ends = ids.flatten().bincount(minlength=count).cumsum(0).int()
    expected = x.new_empty(pairs, n)
    rows = x[order // (top_k if is_first else 1)]
    expected[order] = torch._grouped_mm(rows, weight.transpose(-2, -1), ends)
    return {"ours": [ours], "humming": [humming]}, expected


def measure(shape: str) -> Iterator[Row]:
    """Rows of the record."""
    config = read_architecture(shape)
    for layer, (n, k) in layer_sizes(config).items():
        for rows in ROWS:
            torch.manual_seed(0)
            calls, expected = (
                expert_calls(n, k, rows, config)
                if layer.startswith("experts")
                else linear_calls(n, k, rows, is_shared=layer in ("o", "down"))
            )
            ways = {arm: of_arm for arm, of_arm in calls.items() if arm != "bf16"}
            unequal = sum(int((of_arm[0]() != expected).sum()) for of_arm in ways.values())
            times = time_calls(calls, ROUNDS)
            us = {f"us.{arm}": quartiles(times[arm]) if arm in times else None for arm in ARMS}
            yield {"shape": shape, "layer": layer, "rows": rows, **us, "unequal": unequal}


def main(arguments: argparse.Namespace) -> None:
    """Measures all layers and writes the record after each row."""
    path: Path = arguments.record
    require_device("cuda")
    os.environ[EXACT_VARIABLE] = "1"
    settings = {"rounds": ROUNDS}
    record = {"benchmark": "exact_products", **origin("cuda"), **shape_of(settings, COLUMNS, NOTE)}
    rows: list[Row] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES:
        for row in measure(shape):
            rows.append(row)
            write_json(path, {**record, "rows": rows})
            Console().print(row)
