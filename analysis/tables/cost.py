"""Tables of what QAT costs a training step, on one GPU and under FSDP2, and of repeated syncs."""

from pathlib import Path
from statistics import median
from typing import NamedTuple

from pydantic import BaseModel

from analysis.markdown import MarkdownTable
from analysis.tables.record import Record, read_record

TITLE = "**Time of forward and backward passes of decoder layers, as a share of BF16's**"
NOTE = (
    "QAT: with new scales, as after an optimizer step; scales known: any further micro-batch. "
    "verl's QATLinear leaves the experts of an MoE in BF16. Peak memory: QAT's over BF16's."
)
SYNC_TITLE = "**Is vLLM after many weight syncs the engine that loads the same weights from disk?**"


class Arm(BaseModel):
    """Times of an arm: of its steps in ms, and over BF16's of the same round."""

    step_ms: tuple[float, float, float]
    ratio: float
    peak_gib: float


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


class StepRecord(Record):
    """Of experiments/benchmarks/parameter.py and fsdp.py."""

    stacks: list[Stack]


class Repeated(BaseModel):
    """An engine after many syncs, compared with others of the same weights."""

    syncs: int
    tokens: int
    equal: dict[str, bool]


class BitwiseRecord(Record):
    """Of experiments/benchmarks/bitwise.py."""

    models: dict[str, Repeated]


class RepeatedRow(NamedTuple):
    """A model and what its engine did."""

    name: str
    run: Repeated


COST_TABLE: MarkdownTable[Stack] = MarkdownTable(
    {
        "Layers": lambda stack: f"{stack.layers} of {stack.shape}",
        "GPUs": lambda stack: str(stack.ranks),
        "Setting": lambda stack: stack.setting,
        "BF16, ms": lambda stack: f"{median(stack.arms['bf16'].step_ms):.0f}",
        "QAT": lambda stack: stack.ratio("qat"),
        "QAT, scales known": lambda stack: stack.ratio("qat, scales known"),
        "verl's QATLinear": lambda stack: stack.ratio("verl"),
        "Peak memory": lambda stack: (
            f"{stack.arms['qat'].peak_gib / stack.arms['bf16'].peak_gib:.3f}"
        ),
    }
)
SYNC_TABLE: MarkdownTable[RepeatedRow] = MarkdownTable(
    {
        "Model": lambda row: row.name,
        "Syncs": lambda row: str(row.run.syncs),
        "Sampled tokens compared": lambda row: f"{row.run.tokens:,}",
        "Tokens and log-probs equal in all bits": lambda row: _cases(row.run, True),
        "Not equal": lambda row: _cases(row.run, False),
    }
)


def cost_sections(folder: Path, machine: str) -> list[str]:
    """Costs of a training step.

    Raises:
        ValueError: a record is missing or damaged.
    """
    names = (f"parameter_{machine}", f"fsdp_{machine}x4")
    records = [read_record(folder / f"{name}.json", StepRecord) for name in names]
    stacks = [stack for record in records for stack in record.stacks]
    origin = f"Measured on: {records[0].setup(('torch', 'torch'))}."
    return [origin, TITLE, COST_TABLE.markdown(stacks), NOTE]


def repeated_sync_sections(folder: Path, machine: str) -> list[str]:
    """Whether engines that were synced many times equal fresh ones; `other weights` must not.

    Raises:
        ValueError: the record is missing or damaged.
    """
    record = read_record(folder / f"bitwise_{machine}.json", BitwiseRecord)
    rows = [RepeatedRow(name, run) for name, run in record.models.items()]
    origin = f"Measured on: {record.setup(('vLLM', 'vllm'), ('torch', 'torch'))}."
    return [origin, SYNC_TITLE, SYNC_TABLE.markdown(rows)]


def _cases(run: Repeated, is_equal: bool) -> str:
    return "; ".join(case for case, equal in run.equal.items() if equal == is_equal)
