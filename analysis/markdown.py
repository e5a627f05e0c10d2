"""The one way from rows to a Markdown table and back: a row is its cells' texts by heading."""

from collections.abc import Callable, Iterable, Mapping, Sequence

Row = Mapping[str, str]


def markdown_table(rows: Iterable[Row]) -> str:
    """A GitHub table of the first row's columns, without a final newline; empty without rows."""
    rows = list(rows)
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[row[heading] for heading in rows[0]] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def without_empty(rows: Sequence[Row]) -> list[Row]:
    """The rows without the columns that say nothing of any of them."""
    return _with_columns(rows, lambda cells: not cells <= {"", "-"})


def without_constant(rows: Sequence[Row]) -> list[Row]:
    """The rows without the columns that say one thing of all of them."""
    return _with_columns(rows, lambda cells: len(cells) != 1)


def _with_columns(rows: Sequence[Row], told: Callable[[set[str]], bool]) -> list[Row]:
    columns = [it for it in (rows[0] if rows else ()) if told({row[it] for row in rows})]
    return [{heading: row[heading] for heading in columns} for row in rows]


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
