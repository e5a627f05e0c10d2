"""Table of how many experts decoding steps of an MoE with random weights read."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pydantic import BaseModel

from analysis.markdown import MarkdownTable
from analysis.tables.record import TRANSFORMERS, Record, read_record, setups

NOTE = (
    "Experts of a layer to which the newest tokens of so many sequences go, median over the "
    "layers. Alike: prompts of the same ten tokens. Random: of any tokens. Chance: as many as "
    "independent choices reach on average. Cosine: mean between the hidden states of any "
    "two sequences after the last layer. In BF16 on a CPU."
)


class Layer(BaseModel):
    """Experts by number of sequences, and the mean cosine between sequences."""

    experts: dict[int, int]
    cosine: float


class Load(BaseModel):
    """A model's layers with one kind of prompts."""

    num_experts: int
    layers: list[Layer]

    def reached(self, sequences: int) -> float:
        """Experts that so many sequences reach in a layer."""
        return median(layer.experts[sequences] for layer in self.layers)

    def by_chance(self, sequences: int) -> float:
        """The same if each sequence's experts were chosen at random, independently."""
        share = self.reached(1) / self.num_experts
        return self.num_experts * (1 - (1 - share) ** sequences)


class ExpertLoadRecord(Record):
    """Of experiments/benchmarks/expert_load.py."""

    model: str
    prompts: dict[str, Load]


class Row(NamedTuple):
    """A kind of prompts: its experts by number of sequences, and the mean cosine between these."""

    kind: str
    experts: Sequence[float]
    cosine: float | None


def expert_load_sections(folder: Path, machine: str) -> list[str]:
    """A row for each kind of prompts, and one for chance.

    Raises:
        ValueError: the record is missing or damaged.
    """
    record = read_record(folder / f"expert_load_{machine}.json", ExpertLoadRecord)
    loads = record.prompts
    anyone = next(iter(loads.values()))
    batches = list(anyone.layers[0].experts)
    rows = [
        Row(kind, [load.reached(n) for n in batches], load.layers[-1].cosine)
        for kind, load in loads.items()
    ]
    rows.append(Row("chance", [anyone.by_chance(n) for n in batches], None))
    columns = {
        f"{n} at once": lambda row, i=i: f"{row.experts[i]:.0f}" for i, n in enumerate(batches)
    }
    table: MarkdownTable[Row] = MarkdownTable(
        {"Prompts": lambda row: row.kind}
        | columns
        | {"Cosine": lambda row: "" if row.cosine is None else f"{row.cosine:z.2f}"}
    )
    layer = f"{anyone.num_experts} in a layer of {record.model}"
    title = f"**Experts that a decoding step reads, of {layer}**"
    return [title, table.markdown(rows), f"{NOTE} {setups([record], TRANSFORMERS)}"]
