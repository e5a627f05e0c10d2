"""Draws records of the one shape: setup, columns with their units, rows.

A cell is a text, a number, the quartiles of one, or nothing. What of a row is no column is hidden.
Records of one benchmark and machine with the same columns are one table, in which settings that
they do not share are columns too.
"""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import model_validator

from analysis.markdown import MarkdownTable
from analysis.tables.goals import verdict
from analysis.tables.record import TRANSFORMERS, Record, read_record, setups
from experiments.benchmarks.records import Cell, Column, Row


class RowsRecord(Record):
    """Of experiments/benchmarks; the settings say what was measured, the note how to read it."""

    settings: dict[str, str | int | float]
    columns: dict[str, Column]
    rows: list[Row]
    note: str = ""

    @model_validator(mode="after")
    def cells_are_of_their_columns(self) -> Self:
        """Each row has all columns, and numbers where one has a format."""
        for row in self.rows:
            for key, column in self.columns.items():
                if key not in row or (column.format and isinstance(row[key], str)):
                    raise ValueError(f"rows: {key}: {row.get(key, 'missing')}: not of its column")
        return self

    @property
    def all_settings(self) -> dict[str, str]:
        """In words, the commit among them."""
        words = {name: _text(value, ".3g") for name, value in self.settings.items()}
        return words | {"commit": self.commit}


class Line(NamedTuple):
    """A row and the record that it is of."""

    record: RowsRecord
    row: Row


def rows_sections(*benchmarks: str) -> Callable[[Path, str], list[str]]:
    """Of each `BENCHMARK_MACHINE.json`, which must be there, and others that begin so."""

    def sections(folder: Path, machine: str) -> list[str]:
        records = []
        for benchmark in benchmarks:
            first = folder / f"{benchmark}_{machine}.json"
            others = sorted(it for it in folder.glob(f"{first.stem}*.json") if it != first)
            records += [read_record(path, RowsRecord) for path in (first, *others)]
        tables = groupby(records, key=lambda record: record.columns)
        return [text for _, alike in tables for text in _section(list(alike))]

    return sections


def _section(records: list[RowsRecord]) -> list[str]:
    settings = [record.all_settings for record in records]
    names = dict.fromkeys(name for it in settings for name in it)
    shared = [it for it in names if len({of_record.get(it) for of_record in settings}) == 1]
    said = [f"{name} {settings[0][name]}" for name in shared if name != "commit"]
    columns: dict[str, Callable[[Line], str]] = {
        name: partial(_setting, name) for name in names if name not in shared
    }
    columns |= {it.heading: partial(_cell, key, it) for key, it in records[0].columns.items()}
    lines = [Line(record, row) for record in records for row in record.rows]
    origin = "; ".join([setups(records, TRANSFORMERS).removesuffix("."), *said])
    notes = dict.fromkeys(record.note for record in records if record.note)
    return [f"{origin}.", MarkdownTable(columns).without_empty(lines), *notes]


def _setting(name: str, line: Line) -> str:
    return line.record.all_settings.get(name, "")


def _cell(key: str, column: Column, line: Line) -> str:
    row = line.row
    cell = row[key]
    if not column.bounds or cell is None:
        return _text(cell, column.format)
    value = row[column.bounds]
    assert isinstance(value, int | float) and isinstance(cell, int | float)
    return f"{_text(cell, column.format)}, {verdict(value <= cell)}"


def _text(cell: Cell, form: str) -> str:
    if isinstance(cell, list):
        low, median, high = (format(it, form) for it in cell)
        return f"{median} ({low} to {high})"
    if isinstance(cell, float):
        return format(cell, form)
    return "" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell
