"""Do different kernels give the same bits where the global scale is a power of two?

    python -m experiments.benchmarks.matmul_bits RECORD.json

Then code x block scale is exact in BF16 and the global scale only shifts exponents, so kernels that
add the products of a row in the order of K may agree whatever their tiles are: a trainer in BF16
and an engine in NVFP4 would compute the same. For each layer and number of tokens the arms fall
into groups of equal bits, and each arm is compared with itself: at the largest number of tokens (is
it batch-invariant?), and in repeats of the same product (does it give the same bits again?). With
scale `amax` the products are rounded in BF16 weights only: a control that has to differ. cuBLAS
runs as vLLM's batch-invariant mode sets it up, without split-K; `matmul.py` compares its default.
`--device cpu` rehearses.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from torch import Tensor

from experiments.benchmarks.device import require_device
from experiments.benchmarks.matmul import arms_of, layers
from experiments.benchmarks.products.cases import (
    REPEATS,
    Case,
    case,
    different,
    differing_repeats,
    equal_groups,
    prefix,
    prepare,
    relative_error,
)
from experiments.benchmarks.products.layers import Layer
from experiments.runs.provenance import origin
from experiments.support.cli import run_cli
from experiments.support.json_files import write_json
from qat_core.arguments import positive_int
from qat_core.options import ScalePolicy

TOKENS = [1, 8, 32, 33, 255, 256, 257, 1024, 4096]
UNPACKING = ("dequantize + bf16", "dequantize + grouped bf16")  # the same product as without


def forbid_split_k() -> None:
    """vLLM's settings for Hopper in batch-invariant mode; before the first cuBLAS call."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    if not torch.cuda.is_available():
        return
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.preferred_blas_library(backend="cublaslt")


def compare(layer: Layer, tokens: list[int], device: str, scale: ScalePolicy) -> list[Any]:
    """One row for each number of tokens."""
    arms = [arm for arm in arms_of(layer, device) if arm not in UNPACKING]
    whole = case(prepare(layer, arms, tokens, device, scale, cold=False), max(tokens))
    at_most, _ = whole.outputs()
    rows = []
    for count in tokens:
        this = prefix(whole, count)
        outputs, refusals = this.outputs()
        about = {"layer": layer.key, "scale": scale, "tokens": count}
        figures = {
            "elements": next(iter(outputs.values())).numel(),
            "equal_bits": equal_groups(outputs),
            "arms": describe(this, outputs, at_most),
            "refusals": refusals,
        }
        rows.append(about | figures)
    return rows


def describe(this: Case, outputs: dict[str, Tensor], at_most: dict[str, Tensor]) -> Any:
    """Of each arm its error, and what differs from the first arm and from itself.

    Elements are counted, but of repeats how many have any other bits.
    """
    rows, reference = this.reference()
    first = next(iter(outputs.values()))
    return {
        arm: {
            "error": relative_error(out, rows, reference),
            "differ_from_first": different(out, first),
            "differ_from_most_tokens": different(out, at_most[arm][: len(out)]),
            "differing_repeats": differing_repeats(partial(this.output, arm), out),
        }
        for arm, out in outputs.items()
        if arm in at_most
    }


def main() -> None:
    """Compares all layers under both scales and writes the record after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--layers", nargs="+", metavar="MODEL.NAME")
    parser.add_argument("--tokens", nargs="+", type=positive_int, default=TOKENS)
    arguments = parser.parse_args()
    device = arguments.device
    require_device(device)
    chosen = layers(device, arguments.layers)
    forbid_split_k()
    torch.manual_seed(0)
    record: dict[str, Any] = {
        "benchmark": "matmul_bits",
        **origin(device),
        "repeats": REPEATS,
        "cases": [],
    }
    for layer in chosen:
        for scale in get_args(ScalePolicy):
            rows = compare(layer, arguments.tokens, device, scale)
            for row in rows:
                groups = " | ".join(" = ".join(group) for group in row["equal_bits"])
                Console(width=160).print(layer.key, scale, row["tokens"], groups)
            record["cases"] += rows
            write_json(arguments.record, record)


if __name__ == "__main__":
    run_cli(main)
