"""What benchmarks of vLLM at true model size found, engine by engine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from analysis.tables.rows import RowsRecord, read_records
from experiments.benchmarks.records import Cell, Row

Engines = dict[str, Row]  # by `model:precision`


def read_servings(folder: Path, machine: str) -> list[RowsRecord]:
    """Records of engines that served, one a model."""
    return read_records(folder, machine, "serving_8b", "serving_30b")


def engines_of(records: Sequence[RowsRecord]) -> Engines:
    """The engines of all records."""
    return {str(row["engine"]): row for record in records for row in record.rows}


def read_synced(folder: Path, machine: str) -> Engines:
    """Engines whose weights were synced, with PyTorch's usual allocator."""
    return engines_of(read_records(folder, machine, "rollout"))


def number(row: Mapping[str, Cell], key: str) -> float:
    """A cell that is one, or the median of one with several."""
    value = row[key]
    value = median(value) if isinstance(value, list) else value
    if not isinstance(value, int | float):
        raise ValueError(f"{row.get('engine')}: {key}: {value}: not a number; measure it again")
    return value
