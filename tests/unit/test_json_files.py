"""JSON files of results: written whole, and damage named with its file and how to mend it."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.runs.attempts import list_attempts, next_attempt, read_history
from experiments.runs.provenance import read_manifest
from experiments.support.json_files import REMAKE, read_json, read_json_list, write_json


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("inf")})
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("read", [read_json, read_manifest])
def test_a_mapping_is_read_as_it_is(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": [1, {"b": None}]})
    assert read(path) == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("read", "content", "line"),
    [
        (read_json, b"{", "not JSON (Expecting property name"),
        (read_json, b"\xff\xfe\xfa", "not JSON ("),
        (read_json, b"[1]", "holds no mapping of keys to values;"),
        (read_json_list, b"", "not JSON (Expecting value"),
        (read_json_list, b"{}", "holds no list;"),
        (read_json_list, b"[{}, 1]", "1: holds no mapping of keys to values;"),
    ],
)
def test_damage_is_named_with_its_file(
    tmp_path: Path, read: Callable[[Path], Any], content: bytes, line: str
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as refused:
        read(path)
    assert str(refused.value).startswith(f"{path}: {line}")
    assert str(refused.value).endswith(f"; {REMAKE}")


def test_a_missing_key_is_named_where_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, [{"a": 1}])
    (item,) = read_json_list(path, "mend it")
    assert item["a"] == 1 and item.get("b") is None
    with pytest.raises(ValueError, match=rf"^{path}: 0: b: missing; mend it$"):
        item["b"]


def test_damage_to_an_attempt_is_not_mended_by_deleting_the_file(tmp_path: Path) -> None:
    attempt = next_attempt(tmp_path)
    attempt.write_manifest({})
    with pytest.raises(ValueError, match=r"1/manifest.json: started_at: missing; restore it, or"):
        read_history(tmp_path)


def test_a_damaged_line_of_metrics_is_named(tmp_path: Path) -> None:
    attempt = next_attempt(tmp_path)
    (attempt.folder / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n')
    with pytest.raises(ValueError, match=r"1/metrics.jsonl: line 2: not JSON \(.*; restore it"):
        attempt.rows()


@pytest.mark.parametrize(
    "content", [b"", b"step\n1\n", gzip.compress(b"step\n1\n")[:-9]], ids=["empty", "plain", "cut"]
)
def test_damaged_metrics_of_a_record_are_named(tmp_path: Path, content: bytes) -> None:
    write_json(tmp_path / "manifest.json", {})
    (tmp_path / "metrics.csv.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics.csv.gz: .*; record the study again$"):
        read_history(tmp_path)


def test_a_folder_put_aside_is_no_attempt(tmp_path: Path) -> None:
    next_attempt(tmp_path).write_manifest({})
    (tmp_path / "attempts" / "1").rename(tmp_path / "attempts" / "old")
    assert list_attempts(tmp_path) == []
    assert next_attempt(tmp_path).number == 1
