"""Table of engines after many weight syncs: whether they are those that load the same weights."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from analysis.markdown import MarkdownTable
from analysis.tables.record import EngineRecord, read_parts, setups

TITLE = "**Is vLLM after many weight syncs the engine that loads the same weights from disk?**"
KERNELS = {
    "nvfp4": "Marlin",
    "humming": "Humming",
    "humming-experts": "Marlin, experts by Humming",
    "repeatable": "Marlin or unpacked, experts by Humming",
}
NOTE = (
    "Synced, and slept and synced: through vLLM's reload. In place: past "
    "it, as by default. Again: the same engine, with nothing in between. Fresh: a new "
    "engine that loads the weights from disk, in that form. Other weights, of the first sync, must "
    "differ. Served tensors: parameters and buffers of vLLM's model, without scales that W4A16 "
    "does not read; ModelOpt's form, which names them otherwise, is compared by samples alone."
)


class Way(BaseModel):
    """How an engine was synced: past vLLM's reload, if it could be."""

    in_place: bool


class Repeated(BaseModel):
    """An engine after many syncs, compared with others of the same weights, each by its name.

    Attributes:
        equal: whether samples are.
        equal_weights: whether the served tensors are.
        ways: of its engines; the first records lack these two.
    """

    syncs: int
    tokens: int
    equal: dict[str, bool]
    equal_weights: dict[str, bool] = {}
    ways: dict[str, Way] = {}

    @property
    def repeats_itself(self) -> bool:
        """Whether the same engine samples the same twice."""
        return self.equal.get("synced, again", True)

    @property
    def came_by(self) -> str:
        """How weights came."""
        in_place = any(way.in_place for way in self.ways.values())
        return "reload and in place" if in_place else "reload"

    @property
    def samples(self) -> str:
        """What samples alike; says so if the kernels do not allow to ask."""
        return _named(self.equal, True) if self.repeats_itself else "no: one engine's own differ"

    @property
    def weights(self) -> str:
        """What serves the same tensors."""
        return _named(self.equal_weights, True) or "not recorded"

    @property
    def unequal(self) -> str:
        """What does not, of all that can be asked."""
        asked = [self.equal] if self.repeats_itself else []
        names = (it for of in (*asked, self.equal_weights) for it, equal in of.items() if not equal)
        return _listed(names)


class BitwiseRecord(EngineRecord):
    """Of experiments/benchmarks/bitwise.py."""

    models: dict[str, Repeated]
    kernels: str = "nvfp4"


class Row(NamedTuple):
    """A model and what its engines did."""

    name: str
    record: BitwiseRecord
    run: Repeated


TABLE: MarkdownTable[Row] = MarkdownTable(
    {
        "Model": lambda row: row.name,
        "Kernels": lambda row: KERNELS[row.record.kernels],
        "torch.compile": lambda row: row.record.compiled,
        "Weights came by": lambda row: row.run.came_by,
        "Commit": lambda row: row.record.commit,
        "Syncs": lambda row: str(row.run.syncs),
        "Sampled tokens compared": lambda row: f"{row.run.tokens:,}",
        "Tokens and log-probs equal in all bits": lambda row: row.run.samples,
        "Served tensors equal in all bits": lambda row: row.run.weights,
        "Not equal": lambda row: row.run.unequal,
    }
)


def repeated_sync_sections(folder: Path, machine: str) -> list[str]:
    """Whether engines that were synced many times equal fresh ones, by kernels.

    Raises:
        ValueError: a record is damaged, or there is none of Marlin.
    """
    records = read_parts(folder, "bitwise", machine, BitwiseRecord)
    rows = [Row(name, it, run) for it in records for name, run in it.models.items()]
    return [setups(records), TITLE, TABLE.markdown(rows), NOTE]


def _named(by_name: Mapping[str, bool], equal: bool) -> str:
    return _listed(name for name, it in by_name.items() if it == equal)


def _listed(names: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(names))
