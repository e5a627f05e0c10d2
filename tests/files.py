"""Files of a test: read whole, changed, damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    """Writes a JSON value again after a change in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def set_keys(path: Path, **values: Any) -> None:
    """Writes the mapping of a JSON file again with these keys."""
    edit_json(path, lambda content: content.update(values))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The mappings of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def contents(path: Path) -> dict[str, bytes]:
    """A file, or all files below a folder."""
    files = (each for each in (path, *sorted(path.rglob("*"))) if each.is_file())
    found = {str(each.relative_to(path)): each.read_bytes() for each in files}
    assert found, path
    return found


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
