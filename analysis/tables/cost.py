"""Tables of what QAT costs a training step, on one GPU and under FSDP2."""

from pathlib import Path
from statistics import median
from typing import NamedTuple

from pydantic import BaseModel, PositiveFloat

from analysis.markdown import MarkdownTable
from analysis.tables.goals import STEP_GOALS, verdict
from analysis.tables.record import Record, read_record

SCALES_KNOWN = ", scales known"
ARMS = {
    "qat": "QAT",
    "qat packed": "QAT, kept packed",
    "qat rounded": "QAT, kept rounded",
    "verl": "verl's QATLinear",
}
FSDP_RECORDS = {  # file: host
    "x4_8192": "F",
    "x4": "E",
    "x2_newest": "G",
    "x2": "D",
    "x2_before": "D",
    "x2_oldest": "D",
    "x4_first": "A",
}
TITLE = "**Time of forward and backward passes of decoder layers on one GPU, as a share of BF16's**"
NOTE = (
    "First: the micro-batch after an optimizer step, with new scales, where what is kept is packed "
    'or rounded; further: any other. Kept packed, kept rounded: `prepare(keep="packed")`, '
    '`prepare(keep="rounded")`. verl\'s QATLinear leaves the experts of an MoE in BF16. Goal: of '
    "the first micro-batch, at most, judged before rounding. Peak memory: over BF16's, weights "
    "included. Kept: memory of what is kept until the next optimizer step."
)
FSDP_TITLE = "**The same under FSDP2, by host**"
FSDP_NOTE = (
    "Issued: when the CPU has queued all of BF16's step; where that is nearly the whole step, GPUs "
    "wait for the CPU. Peak memory: over BF16's, packed shards included, sharded weights not."
)


class Arm(BaseModel):
    """Times of an arm: of its steps in ms, and their median over BF16's."""

    step_ms: tuple[float, float, float]
    issue_ms: tuple[float, float, float] | None = None  # under FSDP2; not in the first records
    ratio: float
    peak_gib: PositiveFloat
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

    @property
    def name(self) -> str:
        """Its layers, in words."""
        return f"{self.layers} of {self.shape}"

    @property
    def bf16_ms(self) -> str:
        """Of BF16's step."""
        return f"{median(self.arms['bf16'].step_ms):.0f}"

    @property
    def issue_ms(self) -> str:
        """When the CPU had queued BF16's step, empty where it was not measured."""
        issued = self.arms["bf16"].issue_ms
        return f"{median(issued):.0f}" if issued else ""

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

    def goal(self, arm: str) -> str:
        """What an arm of QAT is to come to, and whether it does; empty for others."""
        if not arm.startswith("qat") or self.shape not in STEP_GOALS:
            return ""
        bound = STEP_GOALS[self.shape]
        return f"{bound:g}, {verdict(self.arms[arm].ratio <= bound)}"

    def kept(self, arm: str) -> str:
        """GiB of the weights that an arm of QAT keeps, empty for others."""
        held_gib, plain_gib = (self.arms[name].weights_gib for name in (arm, "qat"))
        if not arm.startswith("qat ") or held_gib is None or plain_gib is None:
            return ""
        return f"{held_gib - plain_gib:.1f}"


class StepRecord(Record):
    """Of experiments/benchmarks/parameter.py and fsdp.py."""

    stacks: list[Stack]
    tokens_per_rank: int | None = None  # under FSDP2


class Measured(NamedTuple):
    """Layers, and what they were measured with."""

    stack: Stack
    commit: str
    host: str
    tokens: int | None
    transformers: str | None


class MeasuredArm(NamedTuple):
    """An arm of layers on one GPU."""

    stack: Stack
    arm: str


ALONE_TABLE: MarkdownTable[MeasuredArm] = MarkdownTable(
    {
        "Layers": lambda row: row.stack.name,
        "Setting": lambda row: row.stack.setting,
        "BF16, ms": lambda row: row.stack.bf16_ms,
        "Arm": lambda row: ARMS[row.arm],
        "First": lambda row: row.stack.ratio(row.arm),
        "Further": lambda row: row.stack.ratio(row.arm + SCALES_KNOWN),
        "Goal": lambda row: row.stack.goal(row.arm),
        "Peak memory": lambda row: row.stack.peak_ratio(row.arm),
        "Kept, GiB": lambda row: row.stack.kept(row.arm),
    }
)
FSDP_TABLE: MarkdownTable[Measured] = MarkdownTable(
    {
        "Layers": lambda row: row.stack.name,
        "GPUs": lambda row: str(row.stack.ranks),
        "Tokens a rank": lambda row: f"{row.tokens:,}" if row.tokens else "",
        "Setting": lambda row: row.stack.setting,
        "Host": lambda row: row.host,
        "Commit": lambda row: row.commit,
        "transformers": lambda row: row.transformers or "",
        "BF16, ms": lambda row: row.stack.bf16_ms,
        "issued, ms": lambda row: row.stack.issue_ms,
        "QAT": lambda row: row.stack.ratio("qat"),
        "QAT, scales known": lambda row: row.stack.ratio("qat" + SCALES_KNOWN),
        "verl's QATLinear": lambda row: row.stack.ratio("verl"),
        "Peak memory, QAT": lambda row: row.stack.peak_ratio("qat"),
    }
)


def cost_sections(folder: Path, machine: str) -> list[str]:
    """Costs of a training step.

    Raises:
        ValueError: a record is missing or damaged.
    """
    alone = read_record(folder / f"parameter_{machine}.json", StepRecord)
    rows = [
        Measured(
            stack,
            record.commit,
            host,
            record.tokens_per_rank,
            record.versions.get("transformers"),
        )
        for suffix, host in FSDP_RECORDS.items()
        for record in [read_record(folder / f"fsdp_{machine}{suffix}.json", StepRecord)]
        for stack in record.stacks
    ]
    arms = [MeasuredArm(stack, arm) for stack in alone.stacks for arm in ARMS if arm in stack.arms]
    return [
        f"Measured on: {alone.hardware.name}, torch {alone.versions['torch']}, one GPU at commit "
        f"{alone.commit}.",
        TITLE,
        ALONE_TABLE.markdown(arms),
        NOTE,
        FSDP_TITLE,
        FSDP_TABLE.markdown(rows),
        FSDP_NOTE,
    ]
