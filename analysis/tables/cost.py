"""Table of what QAT costs a training step, on one GPU and under FSDP2."""

from pathlib import Path
from statistics import median
from typing import NamedTuple

from pydantic import BaseModel

from analysis.markdown import MarkdownTable
from analysis.tables.goals import KEPT_PACKED_STEP_GOALS, verdict
from analysis.tables.record import Record, read_record

KEPT_PACKED = "qat packed"
TITLE = "**Time of forward and backward passes of decoder layers, as a share of BF16's**"
NOTE = (
    "QAT: with new scales, as after an optimizer step; scales known: any further micro-batch; kept "
    "packed: with `prepare(keep_packed=True)`, packed again in this step, and in any further "
    "micro-batch, which finds them packed. verl's QATLinear leaves the experts of an MoE in BF16. "
    "Goal: of the time with kept packed weights, packing included, at most, judged before "
    "rounding. Peak memory: over BF16's, on one GPU weights included, under FSDP2 packed shards "
    "but not the sharded weights. Packed: what the kept weights take."
)


class Arm(BaseModel):
    """Times of an arm: of its steps in ms, and their median over BF16's."""

    step_ms: tuple[float, float, float]
    ratio: float
    peak_gib: float
    weights_gib: float | None = None  # on one GPU
    packed_shards_gib: float | None = None  # under FSDP2; part of the peak where it is noted


class Stack(BaseModel):
    """Some layers of a shape under one setting."""

    shape: str
    layers: int
    arms: dict[str, Arm]
    ranks: int = 1
    checkpointing: bool | None = None
    compiled_layers: bool = False

    @property
    def setting(self) -> str:
        """What is special about it, in words."""
        words = {
            "gradient checkpointing": bool(self.checkpointing),
            "compiled": self.compiled_layers,
        }
        return ", ".join(word for word, holds in words.items() if holds)

    def ratio(self, arm: str) -> str:
        """An arm's time over BF16's, empty where it was not measured."""
        return f"{self.arms[arm].ratio:.3f}" if arm in self.arms else ""

    def peak_ratio(self, arm: str) -> str:
        """An arm's peak memory over BF16's, empty where not all of it was measured."""
        peak_gib = {
            name: it.peak_gib
            for name, it in self.arms.items()
            if self.ranks == 1 or it.packed_shards_gib is not None
        }
        return f"{peak_gib[arm] / peak_gib['bf16']:.3f}" if arm in peak_gib else ""

    @property
    def goal(self) -> str:
        """What kept packed weights are to come to, and whether they do; empty without them."""
        if KEPT_PACKED not in self.arms or self.shape not in KEPT_PACKED_STEP_GOALS:
            return ""
        bound = KEPT_PACKED_STEP_GOALS[self.shape]
        return f"{bound:g}, {verdict(self.arms[KEPT_PACKED].ratio <= bound)}"

    @property
    def packed(self) -> str:
        """GiB of the packed weights that are kept, empty without them."""
        held_gib = {arm: it.weights_gib for arm, it in self.arms.items() if it.weights_gib}
        if KEPT_PACKED not in held_gib:
            return ""
        return f"{held_gib[KEPT_PACKED] - held_gib['qat']:.1f}"


class StepRecord(Record):
    """Of experiments/benchmarks/parameter.py and fsdp.py."""

    stacks: list[Stack]


class Measured(NamedTuple):
    """Layers and the commit they were measured at."""

    stack: Stack
    commit: str


COST_TABLE: MarkdownTable[Measured] = MarkdownTable(
    {
        "Layers": lambda row: f"{row.stack.layers} of {row.stack.shape}",
        "GPUs": lambda row: str(row.stack.ranks),
        "Setting": lambda row: row.stack.setting,
        "Commit": lambda row: row.commit,
        "BF16, ms": lambda row: f"{median(row.stack.arms['bf16'].step_ms):.0f}",
        "QAT": lambda row: row.stack.ratio("qat"),
        "QAT, scales known": lambda row: row.stack.ratio("qat, scales known"),
        "QAT, kept packed": lambda row: row.stack.ratio(KEPT_PACKED),
        "Kept packed, further": lambda row: row.stack.ratio(f"{KEPT_PACKED}, scales known"),
        "Goal": lambda row: row.stack.goal,
        "verl's QATLinear": lambda row: row.stack.ratio("verl"),
        "Peak memory, QAT": lambda row: row.stack.peak_ratio("qat"),
        "Peak memory, kept packed": lambda row: row.stack.peak_ratio(KEPT_PACKED),
        "Packed, GiB": lambda row: row.stack.packed,
    }
)


def cost_sections(folder: Path, machine: str) -> list[str]:
    """Costs of a training step.

    Raises:
        ValueError: a record is missing or damaged.
    """
    fsdp = (f"fsdp_{machine}{suffix}" for suffix in ("x4_first", "x2", "x4", "x2_again"))
    names = (f"parameter_{machine}", *fsdp)
    records = [read_record(folder / f"{name}.json", StepRecord) for name in names]
    rows = [Measured(stack, record.commit) for record in records for stack in record.stacks]
    origin = f"Measured on: {records[0].hardware.name}, torch {records[0].versions['torch']}."
    return [origin, TITLE, COST_TABLE.markdown(rows), NOTE]
