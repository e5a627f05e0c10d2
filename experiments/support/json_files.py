"""JSON files, each written in one move, so that readers never see half of one.

A file can be damaged all the same: what is read says which file it was and how to mend it.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

Json = dict[str, Any]
REMAKE = "delete it and run the study again"  # true of every file that the workflow makes


class JsonObject(Json):
    """A mapping from a file; a key that it lacks is the file's mistake and named with it."""

    def __init__(self, content: Json, where: str, mend: str) -> None:
        super().__init__(content)
        self.where, self.mend = where, mend

    def __missing__(self, key: str) -> NoReturn:
        raise ValueError(f"{self.where}: {key}: missing; {self.mend}")


def parse_object(text: str | bytes, where: str, mend: str) -> Json:
    """The mapping that a JSON text holds.

    Args:
        text: the JSON.
        where: what an error calls it: its file, and its line if it is one of many.
        mend: what the user can do about damage.

    Raises:
        ValueError: it is not JSON, or no mapping.
    """
    return _as_object(_parse(text, where, mend), where, mend)


def read_json(path: Path, mend: str = REMAKE) -> Json:
    """The mapping in a JSON file; arguments and errors as for `parse_object`."""
    return parse_object(path.read_bytes(), str(path), mend)


def read_json_list(path: Path, mend: str = REMAKE) -> list[Json]:
    """The mappings that a JSON file lists; arguments and errors as for `parse_object`."""
    content = _parse(path.read_bytes(), str(path), mend)
    if not isinstance(content, list):
        raise ValueError(f"{path}: holds no list; {mend}")
    return [_as_object(item, f"{path}: {i}", mend) for i, item in enumerate(content)]


def write_json(path: Path, content: object) -> None:
    """Writes one JSON value."""
    _write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    """Writes one JSON object a line."""
    _write_text(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def _parse(text: str | bytes, where: str, mend: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:  # of the JSON, or of its encoding
        raise ValueError(f"{where}: not JSON ({error}); {mend}") from None


def _as_object(content: Any, where: str, mend: str) -> Json:
    if not isinstance(content, dict):
        raise ValueError(f"{where}: holds no mapping of keys to values; {mend}")
    return JsonObject(content, where, mend)


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
