"""Tables of matrix products with NVFP4 weights: what a decoder layer's take together, by kernel."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from analysis.markdown import MarkdownTable
from analysis.tables.record import Record, read_record
from experiments.benchmarks.matmul_summary import BF16, totals

KERNELS = {
    "marlin": "Marlin",
    "humming": "Humming",
    "humming unsplit": "Humming, unsplit",
    "humming invariant": "Humming, batch-invariant",
}
# ways of one kind of layer each
OTHERS = {
    "humming served": "Humming, as served",
    "triton nvfp4": "Our Triton kernel",
    "dequantize + bf16": "Unpacked, then cuBLAS",
    "dequantize + grouped bf16": "Unpacked, then PyTorch's grouped product",
}
NAMES = {"dense": "linear layers", "experts": "experts"}
NOTE = (
    "In brackets: speed over BF16's, by cuBLAS for linear layers and vLLM's Triton kernel for "
    "experts. Floor: of a kernel with NVFP4 weights, by the bandwidth and the peak measured in "
    "the same run. Unsplit: Humming's tiles with each sum in one thread block. Unpacked: written "
    "in BF16 by our kernel each time. Largest relative error, in the root mean square against "
    "FP64: "
)


class MatmulRecord(Record):
    """Of experiments/benchmarks/matmul.py; a case is one layer's product at a number of tokens."""

    cases: list[dict[str, Any]]


class Products(NamedTuple):
    """Microseconds of a decoder layer's products by kernel, BF16's and the floor among them."""

    tokens: int
    us: dict[str, float]
    baseline: str

    def shown(self, kernel: str) -> str:
        """Microseconds, and how much faster than BF16."""
        return f"{self.us[kernel]:,.0f} ({self.us[self.baseline] / self.us[kernel]:.2f}x)"


def products_table(rows: Sequence[Products]) -> str:
    """A column for each kernel; of `OTHERS` those that all rows have."""
    others = {kernel: it for kernel, it in OTHERS.items() if all(kernel in row.us for row in rows)}
    columns: Mapping[str, Callable[[Products], str]] = {
        "Tokens": lambda row: f"{row.tokens:,}",
        "Floor, us": lambda row: f"{row.us['floor nvfp4']:,.0f}",
        "BF16, us": lambda row: f"{row.us[row.baseline]:,.0f}",
    } | {
        f"{name}, us": lambda row, kernel=kernel: row.shown(kernel)
        for kernel, name in (KERNELS | others).items()
    }
    return MarkdownTable(columns).markdown(rows)


def measured_on(record: Record) -> str:
    """What a record of all these kernels was measured on."""
    packages = (("vLLM", "vllm"), ("torch", "torch"), ("humming-kernels", "humming-kernels"))
    return f"Measured on: {record.setup(*packages)}."


def matmul_sections(folder: Path, machine: str) -> list[str]:
    """A table for each model's linear layers, and its experts, that the record has.

    Raises:
        ValueError: the record is missing or damaged.
    """
    record = read_record(folder / f"matmul_{machine}.json", MatmulRecord)
    sections = [measured_on(record)]
    for model in dict.fromkeys(case["layer"].partition(".")[0] for case in record.cases):
        for kind, baseline in BF16.items():
            by_tokens = totals(record.cases, model, kind)
            if by_tokens:
                rows = [Products(tokens, us, baseline) for tokens, us in by_tokens.items()]
                title = f"**Matrix products of a decoder layer: {NAMES[kind]} of {model}**"
                sections += [title, products_table(rows)]
    return [*sections, NOTE + _errors(record.cases)]


def _errors(cases: list[dict[str, Any]]) -> str:
    """The largest error of each kernel over all cases, in words."""
    errors = {
        name: max(case["arms"][kernel]["error"] for case in cases)
        for kernel, name in KERNELS.items()
    }
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items()) + "."
