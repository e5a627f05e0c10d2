"""The text of a study file: YAML that is broken, merged, or has keys of old."""

from pathlib import Path
from typing import Any

import pytest

from experiments.study.load import load_study
from experiments.study.yaml_file import read_yaml


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rl: {steps: 1\n", "line 2: expected ',' or '}', but got '<stream end>'; fix the YAML"),
        ("seeds: [010]\n", "line 1: 010 counts in eights or sixties in YAML; fix the YAML"),
        ("rl:\n  steps: 1:30\n", "line 2: 1:30 counts in eights or sixties in YAML"),
        ("seeds: [0]\nseeds: [1]\n", "line 2: key 'seeds' is there twice; fix the YAML"),
        ("study: {{ name }}\n", "line 1: found unhashable key; fix the YAML"),
        ("models: {[a]: 1}\n", "line 1: found unhashable key; fix the YAML"),
        ("- 1\n", "not a mapping of keys"),
        ("", "not a mapping of keys"),
        ("rl:\n\tsteps: 1\n", "line 2: found character '\\t' that cannot start any token"),
        ("rl: !x 1\n", "line 1: could not determine a constructor for the tag '!x'"),
        ("rl: *x\n", "line 1: found undefined alias 'x'"),
        ("study: caf\xe9\n", "not YAML text: 'utf-8' codec can't decode byte 0xe9"),
        ("\x00", "not YAML text: unacceptable character #x0000"),
        ("study: 2024-13-45\n", "not YAML text: month must be in 1..12"),
        ("study: !!bool abc\n", "not YAML text: 'abc'"),
        ("study: !!timestamp foo\n", "not YAML text: "),
        ("a: " + "[" * 2000, "not YAML text: maximum recursion depth exceeded"),
    ],
    ids=[
        *("unclosed", "eights", "sixties", "key twice", "template", "list as a key"),
        *("list", "empty"),
        *("tab", "unknown tag", "unknown alias", "Latin-1", "binary"),
        *("no day", "no bool", "no time", "deep"),
    ],
)
def test_broken_yaml(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError) as caught:
        load_study(path)
    assert str(caught.value).startswith(f"{path}: {line}")


@pytest.mark.parametrize(
    ("text", "merged"),
    [
        ("a: &x {k: 1, j: 2}\nb: {<<: *x, k: 3}\n", {"b": {"k": 3, "j": 2}}),
        # the inner mapping's keys are merged into `b` before the inner mapping itself is read
        ("a: {i: &x {<<: {k: 1}, k: 2}}\nb: {<<: *x}\n", {"a": {"i": {"k": 2}}, "b": {"k": 2}}),
    ],
    ids=["overridden", "overridden where it is merged from"],
)
def test_merge_keys(tmp_path: Path, text: str, merged: dict[str, Any]) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text(text)
    assert read_yaml(path).items() >= merged.items()
