"""Table of what rounded rotary frequencies do to log-probs."""

from pathlib import Path

from pydantic import BaseModel

from analysis.markdown import MarkdownTable
from analysis.tables.record import TRANSFORMERS, Record, read_record, setups

RECORDS = ("rotary", "rotary_2048")
NOTE = (
    "Exact KL in nats a token, in BF16 on a CPU: mean, and the first and last quarter of the "
    "positions. Rounded: frequencies in BF16 against FP32. Other kernels: PyTorch's attention "
    "against transformers' own, both with FP32."
)


class Divergence(BaseModel):
    """Nats a token: of all, and by slices of the positions."""

    mean: float
    slices: list[float]

    def __str__(self) -> str:
        return f"{self.mean:.1e} ({self.slices[0]:.1e} to {self.slices[-1]:.1e})"


class Model(BaseModel):
    """A model of experiments/benchmarks/rotary.py."""

    model: str
    layers: int
    random_weights: bool
    sequences: int
    tokens: int
    rounded_kl: Divergence
    other_kernels_kl: Divergence


class RotaryRecord(Record):
    """Of experiments/benchmarks/rotary.py."""

    models: list[Model]


TABLE: MarkdownTable[Model] = MarkdownTable(
    {
        "Model": lambda row: row.model,
        "Weights": lambda row: "random" if row.random_weights else "pretrained",
        "Layers": lambda row: str(row.layers),
        "Sequences of tokens": lambda row: f"{row.sequences} of {row.tokens // row.sequences:,}",
        "Rounded": lambda row: str(row.rounded_kl),
        "Other kernels": lambda row: str(row.other_kernels_kl),
    }
)


def rotary_sections(folder: Path, machine: str) -> list[str]:
    """A row a model and length.

    Raises:
        ValueError: a record is missing or damaged.
    """
    records = [read_record(folder / f"{name}_{machine}.json", RotaryRecord) for name in RECORDS]
    return [
        TABLE.markdown(model for record in records for model in record.models),
        f"{NOTE} {setups(records, TRANSFORMERS)}",
    ]
