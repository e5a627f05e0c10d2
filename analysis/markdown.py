"""The one way from records to a Markdown table: a column is a heading and the text of a cell."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True)
class MarkdownTable(Generic[Row]):
    """How rows of one kind are shown, column by column.

    Attributes:
        columns: by heading, the text of a row's cell.
    """

    columns: Mapping[str, Callable[[Row], str]]

    def markdown(self, rows: Iterable[Row]) -> str:
        """A GitHub table without a final newline."""
        cells = [[show(row) for show in self.columns.values()] for row in rows]
        lines = [list(self.columns), ["---"] * len(self.columns), *cells]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def without_empty(self, rows: Sequence[Row]) -> str:
        """The same without the columns that say nothing of any row."""
        told = {
            heading: show
            for heading, show in self.columns.items()
            if any(show(row) not in ("", "-") for row in rows)
        }
        return MarkdownTable(told).markdown(rows)

    def without_constant(self, rows: Sequence[Row]) -> str:
        """The same without the columns that say one thing of all rows."""
        varied = {
            heading: show
            for heading, show in self.columns.items()
            if len({show(row) for row in rows}) != 1
        }
        return MarkdownTable(varied).markdown(rows)


def read_rows(text: str) -> list[dict[str, str]]:
    """The rows of all GitHub tables of a text, each a cell by its heading."""
    found: list[dict[str, str]] = []
    headings: list[str] | None = None
    for line in text.splitlines():
        line_cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        if not line.startswith("| "):
            headings = None
        elif headings is None:
            headings = line_cells
        elif set(line_cells) != {"---"}:
            found.append(dict(zip(headings, line_cells, strict=True)))
    return found
