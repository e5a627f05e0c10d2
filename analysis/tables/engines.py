"""Table of vLLM at true model size: weight memory and weight sync."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pydantic import BaseModel

from analysis.markdown import MarkdownTable
from analysis.tables.record import Record, read_record, setups

ROLLOUTS = ("rollout", "rollout_expandable")
PRECISIONS = {
    "nvfp4": "NVFP4",
    "humming": "NVFP4, Humming",
    "humming-experts": "NVFP4, experts by Humming",
    "repeatable": "NVFP4, Marlin or unpacked, experts by Humming",
    "bf16": "BF16",
}
SYNC_TITLE = "**Weight memory and weight sync from a BF16 model on the same GPU**"
SYNC_NOTE = (
    "Tensors: what vLLM's weights take, its rotary cache included, and the prediction from shapes "
    "against it. Gaps: what PyTorch's allocator leaves between them, which vLLM's own report "
    "includes (none with `expandable_segments`); some 0.02 GiB are of the model that is synced "
    "from. Sync: through vLLM's reload; in place: past it, as by default; packing: the "
    "trainer's part of either. Medians of five. Extra memory: peak during a sync through the "
    "reload. vLLM's own load: the same BF16 tensors through `load_weights`, as verl syncs them."
)


class Memory(BaseModel):
    """Weights of an engine: what vLLM reports, its tensors, how far the prediction is off."""

    reported_gib: float
    tensors_gib: float
    layer_gib: float
    predicted_over_tensors: float
    allocator_gaps_gib: float


class Sync(BaseModel):
    """One weight sync; the extra memory is its peak."""

    seconds: float
    extra_gib: float


class SyncedEngine(BaseModel):
    """An engine of experiments/benchmarks/rollout.py."""

    memory: Memory
    syncs: list[Sync]
    packing: list[Sync] = []
    in_place_syncs: list[Sync] = []
    stock_syncs: list[Sync] = []

    @property
    def extra_gib(self) -> float:
        """Most memory that any sync took for a while."""
        return max(sync.extra_gib for sync in self.syncs)


def seconds(syncs: Sequence[Sync]) -> str:
    """Median time, empty where it was not measured."""
    return f"{median(sync.seconds for sync in syncs):.3f}" if syncs else ""


class RolloutRecord(Record):
    """Of experiments/benchmarks/rollout.py; engines are named `model:precision`."""

    allocator: str
    engines: dict[str, SyncedEngine]


class SyncRow(NamedTuple):
    """An engine and the commit that it was measured at."""

    name: str
    commit: str
    engine: SyncedEngine


SYNC_TABLE: MarkdownTable[SyncRow] = MarkdownTable(
    {
        "Engine": lambda row: row.name,
        "Commit": lambda row: row.commit,
        "vLLM's report, GiB": lambda row: f"{row.engine.memory.reported_gib:.2f}",
        "Tensors, GiB": lambda row: f"{row.engine.memory.tensors_gib:.2f}",
        "Prediction error": lambda row: f"{row.engine.memory.predicted_over_tensors:.3%}",
        "Gaps, GiB": lambda row: f"{row.engine.memory.allocator_gaps_gib:.3f}",
        "Sync, s": lambda row: seconds(row.engine.syncs),
        "In place, s": lambda row: seconds(row.engine.in_place_syncs),
        "Packing alone, s": lambda row: seconds(row.engine.packing),
        "Extra memory, GiB": lambda row: f"{row.engine.extra_gib:.2f}",
        "One BF16 layer, GiB": lambda row: f"{row.engine.memory.layer_gib:.2f}",
        "vLLM's own load, s": lambda row: seconds(row.engine.stock_syncs),
    }
)


def read_rollouts(folder: Path, machine: str) -> list[RolloutRecord]:
    """Records of engines that were synced.

    Which of ROLLOUTS there are differs between machines.

    Raises:
        ValueError: there is none, or one is damaged.
    """
    files = [folder / f"{name}_{machine}.json" for name in ROLLOUTS]
    existing = [file for file in files if file.exists()] or files[:1]
    return [read_record(file, RolloutRecord) for file in existing]


def syncs_alone_sections(folder: Path, machine: str) -> list[str]:
    """Weight syncs of a machine on which nothing was served."""
    records = read_rollouts(folder, machine)
    return [setups(records), *sync_sections(records)]


def sync_sections(records: Sequence[RolloutRecord]) -> list[str]:
    """Title, table and note of weight syncs."""
    rows = [
        SyncRow(engine_name(name, record.allocator), record.commit, engine)
        for record in records
        for name, engine in record.engines.items()
    ]
    return [SYNC_TITLE, SYNC_TABLE.markdown(sorted(rows, key=lambda row: row.name)), SYNC_NOTE]


def engine_name(name: str, allocator: str = "") -> str:
    """`model:precision` in words, with the allocator's setting where it is not the default."""
    model, _, precision = name.partition(":")
    return f"{model} {PRECISIONS[precision]}{allocator and f', `{allocator}`'}"


def reported_weights_gib(folder: Path, machine: str) -> dict[tuple[str, str | None], float]:
    """GiB of weights as vLLM reported them, of PyTorch's usual allocator; by model, precision."""
    return {
        (name.partition(":")[0], name.partition(":")[2]): engine.memory.reported_gib
        for name, engine in synced_engines(folder, machine).items()
    }


def synced_engines(folder: Path, machine: str) -> dict[str, SyncedEngine]:
    """By `model:precision`, engines with PyTorch's usual allocator."""
    return {
        name: engine
        for record in read_rollouts(folder, machine)
        if not record.allocator
        for name, engine in record.engines.items()
    }
