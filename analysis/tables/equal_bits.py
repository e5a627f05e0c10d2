"""Table of equal bits: which kernels multiply alike, in a larger batch, and once more."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from analysis.markdown import MarkdownTable
from analysis.tables.matmul import KERNELS, NAMES, measured_on
from analysis.tables.record import Record, read_record
from experiments.benchmarks.matmul_summary import BF16

KERNEL_NAMES = {
    "bf16": "cuBLAS, BF16 weights",
    "triton persistent": "vLLM's batch-invariant Triton kernel, BF16 weights",
    "triton nvfp4": "our Triton kernel",
    "triton bf16": "vLLM's Triton kernel, BF16 weights",
    "grouped bf16": "PyTorch's grouped product, BF16 weights",
} | KERNELS
NOTE = (
    "Counted are the products of all layers at all numbers of tokens. Equal to BF16: in all bits "
    "to the first row of the table. Equal in the largest batch: these tokens have the same bits "
    "among the most tokens. Repeats: with the same inputs, compared with the first result. Global "
    "scales are powers of two (`pow2`), but for the control `amax`, where BF16 weights are rounded "
    "once more. Largest relative error: in the root mean square against FP64. cuBLAS runs without "
    "split-K. Unsplit: Humming's tiles with each sum in one thread block."
)


class Product(BaseModel):
    """One kernel's product: its error, and how many elements have other bits.

    Attributes:
        differing_repeats: how many repeats have any; absent in the first records.
    """

    error: float
    differ_from_first: int
    differ_from_most_tokens: int
    differing_repeats: int | None = None


class Case(BaseModel):
    """A layer at a number of tokens, by kernel."""

    layer: str
    scale: str
    tokens: int
    arms: dict[str, Product]


class BitsRecord(Record):
    """Of experiments/benchmarks/matmul_bits.py."""

    cases: list[Case]
    repeats: int = 0


class Row(NamedTuple):
    """A kernel, and the cases of its kind of layer."""

    kernel: str
    cases: Sequence[Case]
    repeats: int

    def products(self, scale: str = "pow2", below: float = float("inf")) -> list[Product]:
        """Those of the cases that it took, with fewer than so many tokens."""
        return [
            case.arms[self.kernel]
            for case in self.cases
            if case.scale == scale and case.tokens < below and self.kernel in case.arms
        ]

    def equal_to_bf16(self, scale: str) -> str:
        """How many have the bits of the first kernel, which multiplies BF16 weights."""
        return _share([product.differ_from_first == 0 for product in self.products(scale)])

    @property
    def batch_invariant(self) -> str:
        """How many have the bits that their rows have among the most tokens."""
        smaller = self.products(below=max(case.tokens for case in self.cases))
        return _share([product.differ_from_most_tokens == 0 for product in smaller])

    @property
    def differing_repeats(self) -> str:
        """How many repeats have other bits."""
        counts = [product.differing_repeats for product in self.products()]
        known = [count for count in counts if count is not None]
        return f"{sum(known)} of {self.repeats * len(known)}" if known else "not recorded"


TABLE: MarkdownTable[Row] = MarkdownTable(
    {
        "Kernel": lambda row: KERNEL_NAMES.get(row.kernel, row.kernel),
        "Equal to BF16": lambda row: row.equal_to_bf16("pow2"),
        "Equal to BF16, `amax`": lambda row: row.equal_to_bf16("amax"),
        "Equal in the largest batch": lambda row: row.batch_invariant,
        "Repeats with other bits": lambda row: row.differing_repeats,
        "Largest relative error": lambda row: f"{max(it.error for it in row.products()):.1e}",
    }
)


def equal_bits_sections(folder: Path, machine: str) -> list[str]:
    """A table of linear layers, and of experts, that the record has.

    Raises:
        ValueError: the record is missing or damaged.
    """
    record = read_record(folder / f"matmul_bits_{machine}.json", BitsRecord)
    sections = [measured_on(record)]
    for kind, baseline in BF16.items():
        cases = [case for case in record.cases if baseline in case.arms]
        if cases:
            models = dict.fromkeys(case.layer.partition(".")[0] for case in cases)
            kernels = dict.fromkeys(kernel for case in cases for kernel in case.arms)
            rows = [Row(kernel, cases, record.repeats) for kernel in kernels]
            title = f"**Equal bits: {NAMES[kind]} of {' and '.join(models)}**"
            sections += [title, TABLE.markdown(rows)]
    return [*sections, NOTE]


def _share(holds: Sequence[bool]) -> str:
    return f"{sum(holds)} of {len(holds)}"
