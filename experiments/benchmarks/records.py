"""Records of benchmarks: their one shape, and how one is gone on with."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from experiments.support.json_files import read_json

# nothing, a text, a number, or several of one quantity: all, or their quartiles
Cell = None | str | bool | int | float | Annotated[list[float], Field(min_length=1)]
Row = dict[str, Cell]
Setting = str | bool | int | float
ENGINE_PACKAGES = ("vllm", "torch")


class Column(BaseModel):
    """How a column is shown."""

    heading: str  # what it is, and its unit
    format: Annotated[str, Field(pattern=r"^(g|,?(\.\d[efg%])?)$")] = ""  # of its numbers
    bounds: str | None = None  # the column whose numbers are at most these where a goal is met
    ratio: str | None = None  # the column of its times BF16's speed, in brackets behind it


def shape_of(
    settings: Mapping[str, Setting],
    columns: Mapping[str, Column],
    note: str = "",
    packages: Sequence[str] = ("torch", "transformers"),
) -> dict[str, Any]:
    """What a record says beside its machine, versions, commit and rows."""
    shown = {key: column.model_dump(exclude_defaults=True) for key, column in columns.items()}
    return {"packages": list(packages), "settings": dict(settings), "columns": shown, "note": note}


def flat(figures: Any, key: str = "") -> Row:
    """Nested figures as cells of one row, `outer.inner`; of repeated ones a list each."""
    if isinstance(figures, list) and figures and isinstance(figures[0], dict):
        figures = {name: [it[name] for it in figures] for name in figures[0]}
    if not isinstance(figures, dict):
        return {key: figures}
    inner = (flat(it, f"{key}.{name}" if key else name) for name, it in figures.items())
    return {name: cell for cells in inner for name, cell in cells.items()}


def complete(columns: Mapping[str, Column], row: Row) -> Row:
    """A row with all columns, those that it lacks empty."""
    return {**dict.fromkeys(columns), **row}


def read_continued(path: Path, setup: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record there already, of the same machine, versions, commit and settings; or None."""
    if not path.exists():
        return None
    kept = read_json(path, "name a new file")
    for key, value in setup.items():
        if kept.get(key) != value:
            raise ValueError(f"{path}: {key} differs: name a new file")
    return kept
