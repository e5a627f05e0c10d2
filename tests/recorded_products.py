"""Times of products of kernels and of unpacking first, from an H100's record."""

from collections import defaultdict

from experiments.study.schema import ROOT
from experiments.support.json_files import read_json

RECORD = ROOT / "experiments" / "records" / "benchmarks" / "matmul_h100.json"


def losses_by_rows(kernel: str, unpack_from: int) -> dict[tuple[str, int], float]:
    """Time over that of the better way, by model and rows, if many rows are unpacked first."""
    chosen_us: dict[tuple[str, int], float] = defaultdict(float)
    best_us: dict[tuple[str, int], float] = defaultdict(float)
    for case in read_json(RECORD)["cases"]:
        kernel_us, unpacked_us = (
            case["arms"][arm]["us"][1] for arm in (kernel, "dequantize + bf16")
        )
        layer = case["layer"].partition(".")[0], case["tokens"]
        chosen_us[layer] += kernel_us if case["tokens"] < unpack_from else unpacked_us
        best_us[layer] += min(kernel_us, unpacked_us)
    return {layer: chosen_us[layer] / best_us[layer] for layer in best_us}
