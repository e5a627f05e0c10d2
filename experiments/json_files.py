"""JSON files, each written in one move, so that readers never see half of one."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def read_json(path: Path) -> Any:
    """Reads a JSON file."""
    return json.loads(path.read_text())


def write_json(path: Path, content: object) -> None:
    """Writes one JSON value."""
    _write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    """Writes one JSON object a line."""
    _write_text(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
