"""JSON files: each written in one move, read with errors that name file, key and hint."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

Json = dict[str, Any]
Parsed = TypeVar("Parsed")
DELETE = "delete it and "
REMAKE = f"{DELETE}run the study again"  # true of every file that the workflow makes


def parse_object(text: str | bytes, where: str, hint: str) -> Json:
    """The mapping that a JSON text holds; `where` is what an error calls it."""
    content = _parse(text, where, hint)
    if not isinstance(content, dict):
        raise ValueError(f"{where}: not a mapping of keys to values; {hint}")
    return content


def read_json(path: Path, hint: str = REMAKE) -> Json:
    """The mapping in a JSON file; arguments and errors as for `parse_object`."""
    return parse_object(read_bytes(path, hint), str(path), hint)


def read_model(path: Path, kind: type[Parsed], hint: str = REMAKE) -> Parsed:
    """A JSON file as a pydantic model or any other type that pydantic knows."""
    return check_model(_parse(read_bytes(path, hint), str(path), hint), str(path), kind, hint)


def check_model(content: object, where: str, kind: type[Parsed], hint: str) -> Parsed:
    """As `read_model`, of JSON that was read; `where` is what an error calls it."""
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ": ".join(filter(None, (where, ".".join(map(str, first["loc"])))))
        raise ValueError(f"{where}: {_describe(first['msg'])}; {hint}") from None


def read_bytes(path: Path, hint: str) -> bytes:
    """A file's content."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: missing; {hint.removeprefix(DELETE)}") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {hint}") from None


def flatten(tree: Json, prefix: str = "") -> Json:
    """A nested mapping as one level, its keys joined by "."."""
    flat: Json = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def write_json(path: Path, content: object) -> None:
    """Writes one JSON value."""
    _write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    """Writes one JSON object per line."""
    _write_text(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def _parse(text: str | bytes, where: str, hint: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # of the JSON, or of its encoding
        raise ValueError(f"{where}: not JSON ({error}); {hint}") from None


def _describe(message: str) -> str:
    """Pydantic's message in this project's words."""
    if message == "Field required":
        return "missing"
    return message.removeprefix("Value error, ").removeprefix("Input ")


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
