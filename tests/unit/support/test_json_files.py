"""JSON files: written whole, and damage named with file, key and hint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from experiments.support.json_files import REMAKE, read_json, read_model, write_json


class Item(BaseModel):
    a: int


def read_items(path: Path) -> list[Item]:
    return read_model(path, list[Item])


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("inf")})
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_mapping_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": [1, {"b": None}]})
    assert read_json(path) == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("read", "content", "line"),
    [
        (read_json, b"{", "not JSON (Expecting property name"),
        (read_json, b"\xff\xfe\xfa", "not JSON ("),
        (read_json, b"[" * 100_000, "not JSON ("),
        (read_json, b"[1]", "not a mapping of keys to values;"),
        (read_json, None, "missing;"),
        (read_items, b"", "not JSON (Expecting value"),
        (read_items, b"{}", "should be a valid list;"),
        (read_items, b'[{"a": 1}, 1]', "1: should be a valid dictionary"),
        (read_items, b'[{"a": 1}, {}]', "1.a: missing;"),
        (read_items, b'[{"a": "x"}]', "0.a: should be a valid integer"),
    ],
)
def test_damage_is_named_with_its_file(
    tmp_path: Path, read: Callable[[Path], Any], content: bytes | None, line: str
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as refused:
        read(path)
    assert str(refused.value).startswith(f"{path}: {line}")
    assert str(refused.value).endswith(f"; {REMAKE}")
