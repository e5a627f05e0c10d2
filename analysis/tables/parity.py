"""Table of the k3 KL between trainer and vLLM on the same sampled tokens."""

from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from analysis.claims_table import show_ratio
from analysis.tables.record import Record, read_record
from analysis.tables.table import Table

ARMS = {"qat-pow2": "QAT", "qat-amax": "QAT, amax scale", "no-qat": "No QAT"}
TITLE = "**k3 KL between trainer and vLLM on sampled tokens, 95 % intervals**"
NOTE = (
    "QAT: power-of-two scale. Intervals: bootstrap over batches of sequences, where there is no "
    "last column over three seeds. A model that was not trained rounded is less certain once it is "
    "rounded, which raises the KL of equal bits: the last column is against its rounded weights "
    "served in BF16. In an MoE a few rerouted tokens carry much of the KL, in BF16 too."
)


class Ratio(BaseModel):
    """Mean k3 KL of an arm over a floor's, with its 95 % interval."""

    mean_k3_kl: float
    ratio: float
    low: float
    high: float
    tokens: int

    def __str__(self) -> str:
        return f"{show_ratio(self.ratio)} ({show_ratio(self.low)} to {show_ratio(self.high)})"


class ParityModel(BaseModel):
    """Arms of one model, over the BF16 model's floor and over that of its rounded weights."""

    of_noise_floor: dict[str, Ratio]
    of_rounded_floor: dict[str, Ratio] = {}


class ParityRecord(Record):
    """Of experiments/benchmarks/parity.py."""

    weights: str
    models: dict[str, ParityModel]


class ParityRow(NamedTuple):
    """A model and the name of its row."""

    name: str
    model: ParityModel


PARITY_TABLE: Table[ParityRow] = Table(
    {
        "Model": lambda row: row.name,
        "Tokens an arm": lambda row: (
            f"{min(arm.tokens for arm in row.model.of_noise_floor.values()):,}"
        ),
        "BF16, nats a token": lambda row: f"{row.model.of_noise_floor['bf16'].mean_k3_kl:.2e}",
    }
    | {
        f"{label} / BF16": lambda row, arm=arm: str(row.model.of_noise_floor[arm])
        for arm, label in ARMS.items()
    }
    | {
        "QAT / rounded weights in BF16": lambda row: str(
            row.model.of_rounded_floor.get("qat-pow2", "")
        )
    }
)


def read_parity(folder: Path, machine: str) -> list[ParityRecord]:
    """All parity records of a machine, by name."""
    files = sorted(folder.glob(f"parity*_{machine}.json"))
    return [read_record(path, ParityRecord) for path in files]


def parity_sections(records: list[ParityRecord]) -> list[str]:
    """Title, table and note."""
    rows = [
        ParityRow(f"{name}, {record.weights} weights", model)
        for record in records
        for name, model in record.models.items()
    ]
    return [TITLE, PARITY_TABLE.markdown(rows), NOTE]
