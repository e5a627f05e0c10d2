"""Records of benchmarks: their one shape, and how one is gone on with.

A record has a setup (machine, versions, commit, settings), columns with their units, and rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from experiments.support.json_files import read_json

# nothing, a text, a number, or a number's quartiles: low, median, high
Cell = None | str | bool | int | float | Annotated[list[float], Field(min_length=3, max_length=3)]
Row = dict[str, Cell]


class Column(BaseModel):
    """How a column is shown.

    Attributes:
        heading: what it is, and its unit.
        format: of its numbers, as `format` has it; a column of texts has none.
        bounds: the column whose numbers are at most these where a goal is met.
    """

    heading: str
    format: Annotated[str, Field(pattern=r"^(g|,?(\.\d[efg%])?)$")] = ""
    bounds: str | None = None


def shape_of(
    settings: Mapping[str, str | int | float], columns: Mapping[str, Column], note: str = ""
) -> dict[str, Any]:
    """What a record says beside its machine, versions, commit and rows."""
    shown = {key: column.model_dump(exclude_defaults=True) for key, column in columns.items()}
    return {"settings": dict(settings), "columns": shown, "note": note}


def read_continued(path: Path, setup: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record that is there already, or None.

    Args:
        path: its file.
        setup: what it must have been measured with: machine, versions, commit and settings.

    Raises:
        ValueError: the record is of another commit, machine or setting, or damaged.
    """
    if not path.exists():
        return None
    kept = read_json(path, "name a new file")
    for key, value in setup.items():
        if kept.get(key) != value:
            raise ValueError(f"{path}: {key} differs: name a new file")
    return kept
