"""Table of parts of a step whose weights lie on the host in between, now and before a change."""

from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, PositiveFloat

from analysis.markdown import MarkdownTable
from analysis.tables.record import Record, read_record

NOTE = (
    "Median of so many rounds, BF16 and QAT in turns; in brackets their quartiles. Ratios are of "
    "medians, each to BF16 of the same record. Before: with `qat_core/parameter.py` of commit "
    "d313041, else the same code, right after on the same host. Log-probs and training fetch the "
    "weights first and offload them after."
)


class Part(BaseModel):
    """Quartiles of its time."""

    ms: tuple[PositiveFloat, PositiveFloat, PositiveFloat]

    @property
    def shown(self) -> str:
        """Median and quartiles."""
        low, median, high = (f"{ms:,.0f}" for ms in self.ms)
        return f"{median} ({low} to {high})"


class Arms(BaseModel):
    """Parts of a step by name."""

    bf16: dict[str, Part]
    qat: dict[str, Part]

    def ratio(self, part: str) -> str:
        """QAT's time over BF16's."""
        return f"{self.qat[part].ms[1] / self.bf16[part].ms[1]:.3f}"


class Stack(BaseModel):
    """Layers of a shape."""

    shape: str
    layers: int
    ranks: int
    arms: Arms


class OffloadRecord(Record):
    """Of experiments/benchmarks/offloaded_steps.py."""

    sequences: int
    tokens_per_sequence: int
    micro_batches: int
    rounds: int
    stacks: list[Stack]


class Row(NamedTuple):
    """A part of a step, now and before."""

    part: str
    now: Stack
    before: Stack


TABLE: MarkdownTable[Row] = MarkdownTable(
    {
        "Layers": lambda row: f"{row.now.layers} of {row.now.shape}",
        "Part": lambda row: row.part,
        "BF16, ms": lambda row: row.now.arms.bf16[row.part].shown,
        "QAT, ms": lambda row: row.now.arms.qat[row.part].shown,
        "of BF16's": lambda row: row.now.arms.ratio(row.part),
        "BF16 before, ms": lambda row: row.before.arms.bf16[row.part].shown,
        "QAT before, ms": lambda row: row.before.arms.qat[row.part].shown,
        "of BF16's, before": lambda row: row.before.arms.ratio(row.part),
    }
)


def offload_sections(folder: Path, machine: str) -> list[str]:
    """Setup and table.

    Raises:
        ValueError: a record is missing or damaged, or they have not the same layers.
    """
    now, before = (
        read_record(folder / f"offloaded_steps_{machine}{suffix}.json", OffloadRecord)
        for suffix in ("", "_before")
    )
    names = [[(it.shape, it.layers, it.ranks) for it in it.stacks] for it in (now, before)]
    if names[0] != names[1]:
        raise ValueError(
            f"{folder}: offloaded_steps_{machine}.json and its _before.json have other layers; "
            "run the benchmark again for both"
        )
    rows = [
        Row(part, *stacks)
        for stacks in zip(now.stacks, before.stacks, strict=True)
        for part in stacks[0].arms.bf16
    ]
    setup = now.setup(("torch", "torch"), ("transformers", "transformers"))
    return [
        f"Measured on: {setup}; {now.micro_batches} micro-batches of {now.sequences} sequences of "
        f"{now.tokens_per_sequence} tokens a rank, {now.rounds} rounds.",
        TABLE.markdown(rows),
        NOTE,
    ]
