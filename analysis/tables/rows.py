"""Draws records of the one shape: setup, columns with their units, rows.

A cell is a text, a number, several of one quantity, or nothing. What of a row is no column is
hidden. Records of the same columns are one table, in which settings that they do not share are
columns too. A table that is computed from several records has a file of its own beside this one.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Self

from pydantic import AliasChoices, BaseModel, Field, model_validator

from analysis.benchmark_records import read_record, record_paths
from analysis.markdown import markdown_table, without_empty
from experiments.benchmarks.records import Cell, Column, Row, Setting

LABELS = {"vllm": "vLLM"}  # of packages


class Hardware(BaseModel):
    """What a record was measured on."""

    cpu: str = ""
    gpus: list[str]

    @property
    def name(self) -> str:
        """The GPUs, or else the processor, in words."""
        kinds = Counter(self.gpus).items()
        names = [gpu if count == 1 else f"{count} {gpu}" for gpu, count in kinds]
        return " and ".join(names) or self.cpu


class Commit(BaseModel):
    """The code of a measurement."""

    commit: str | None
    dirty: bool


class RowsRecord(BaseModel):
    """Of experiments/benchmarks; the settings say what was measured, the note how to read it."""

    hardware: Hardware | None = None
    versions: dict[str, str | None] = {}
    git: Commit | None = None
    packages: list[str] = ["torch", "transformers"]
    settings: dict[str, Setting] = {}
    columns: dict[str, Column]
    rows: list[Row] = Field(validation_alias=AliasChoices("rows", "comparisons"))
    note: str = ""

    @model_validator(mode="after")
    def cells_are_of_their_columns(self) -> Self:
        """Each row has all columns, and numbers where one has a format; versions are named."""
        for package in self.packages if self.hardware else ():
            if package not in self.versions:
                raise ValueError(f"versions: {package}: missing")
        for row in self.rows:
            for key, column in self.columns.items():
                if key not in row or (column.format and isinstance(row[key], str)):
                    raise ValueError(f"rows: {key}: {row.get(key, 'missing')}: not of its column")
        return self

    @property
    def machine(self) -> str:
        """What it was measured on, in words; empty of what was computed."""
        return self.hardware.name if self.hardware else ""

    @property
    def has_one_commit(self) -> bool:
        """Whether it says one, and not its rows."""
        return self.hardware is not None and "commit" not in self.columns

    @property
    def setup(self) -> str:
        """Hardware, versions and commit; empty of what was computed and not measured."""
        if self.hardware is None:
            return ""
        named = [f"{LABELS.get(it, it)} {self.versions[it]}" for it in self.packages]
        commit = [f"commit {self.commit}"] if self.has_one_commit else []
        return ", ".join([self.machine, *named, *commit])

    @property
    def commit(self) -> str:
        """The commit, and whether it had been changed; the first records name none."""
        if self.git is None or self.git.commit is None:
            return "not recorded"
        changed = " with uncommitted changes" if self.git.dirty else ""
        return f"{self.git.commit[:7]}{changed}"

    @property
    def words(self) -> dict[str, str]:
        """All settings, the commit among them."""
        words = {name.replace("_", " "): _text(it, ".3g") for name, it in self.settings.items()}
        return words | ({"commit": self.commit} if self.has_one_commit else {})


def read_records(folder: Path, machine: str, *benchmarks: str) -> list[RowsRecord]:
    """Of each `BENCHMARK_MACHINE.json`, and others that begin so.

    The file itself must be there, unless the benchmark is a pattern with `*`.
    """
    files: list[Path] = []
    for benchmark in benchmarks:
        first = folder / f"{benchmark}_{machine}.json"
        files += [] if "*" in benchmark else [first]
        files += [it for it in record_paths(folder, f"{first.stem}*.json") if it not in files]
    return [read_record(path, RowsRecord) for path in files]


def rows_sections(*benchmarks: str) -> Callable[[Path, str], list[str]]:
    """Tables of what `read_records` finds."""

    def sections(folder: Path, machine: str) -> list[str]:
        return sections_of(read_records(folder, machine, *benchmarks))

    return sections


def sections_of(records: Sequence[RowsRecord]) -> list[str]:
    """Setup, table and note of neighbouring records with the same columns."""
    tables = groupby(records, key=lambda record: record.columns)
    return [text for _, alike in tables for text in _section(list(alike))]


def _section(records: list[RowsRecord]) -> list[str]:
    settings = [record.words for record in records]
    names = dict.fromkeys(name for it in settings for name in it)
    shared = [it for it in names if len({of_record.get(it) for of_record in settings}) == 1]
    said = [f"{it} {settings[0][it]}" for it in shared if it != "commit" and settings[0][it]]
    rows = [
        {name: record.words.get(name, "") for name in names if name not in shared}
        | {it.heading: _cell(key, it, row) for key, it in record.columns.items()}
        for record in records
        for row in record.rows
    ]
    setups = "; ".join(sorted({record.setup for record in records} - {""}))
    origin = "; ".join([*([f"Measured on: {setups}"] if setups else []), *said])
    notes = dict.fromkeys(record.note for record in records if record.note)
    first = [f"{origin}."] if origin else []
    return [*first, markdown_table(without_empty(rows)), *notes]


def _cell(key: str, column: Column, row: Row) -> str:
    cell = row[key]
    if column.ratio and cell is not None:
        ratio = row.get(column.ratio)
        in_brackets = "" if ratio is None else f" ({ratio:.2f}x)"
        return (
            f"{_text(median(cell) if isinstance(cell, list) else cell, column.format)}{in_brackets}"
        )
    if not column.bounds or cell is None:
        return _text(cell, column.format)
    value = row[column.bounds]
    if not isinstance(value, int | float) or not isinstance(cell, int | float):
        raise ValueError(f"rows: {key}: {cell}: bounds {value}, which is no number")
    return f"{_text(cell, column.format)}, {verdict(value <= cell)}"


def _text(cell: Cell, form: str) -> str:
    if cell is None or isinstance(cell, str):
        return cell or ""
    if isinstance(cell, list):
        middle, low, high = (format(it, form) for it in (median(cell), min(cell), max(cell)))
        return middle if low == high else f"{middle} ({low} to {high})"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:,}" if isinstance(cell, int) else format(cell, form)


def verdict(is_met: bool) -> str:
    """In words, a missed goal in bold."""
    return "met" if is_met else "**missed**"


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
