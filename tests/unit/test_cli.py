"""`qat-core` and `python -m qat_core.checkpoint`: commands, help, what a mistake ends with."""

import argparse
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.study.schema import Study
from qat_core import convert
from qat_core.arguments import LARGEST_SEED, positive_float, positive_int, study_seed
from qat_core.checkpoint.__main__ import main as checkpoint_main
from qat_core.cli import COMMANDS, main
from qat_core.planning.recipe import Recipe
from tests.files import contents
from tests.workflow.programs import module


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["qat-core", *map(str, words)])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_every_option(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda it, *_: shown.append(it))
    assert run(monkeypatch, command, "--help") == 0
    (parser,) = shown
    assert parser.prog == f"qat-core {command}"
    assert [it.dest for it in parser._actions if not it.help] == []


def test_the_command_alone_lists_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--help") == 0
    listed = capsys.readouterr().out
    assert all(f"  {command} " in f"{listed} ".replace("\n", " ") for command in COMMANDS)
    assert run(monkeypatch, "no-such-command") == 2


@pytest.mark.parametrize("nano_dir", ["nano-dense"], indirect=True)
def test_a_checkpoint_is_explained_converted_and_verified(
    nano_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    packed = tmp_path / "packed"
    assert run(monkeypatch, "explain", nano_dir, "--recipe", "ffn") == 0
    said = capsys.readouterr().out
    assert "down_proj.weight" in said and "NVFP4" in said
    assert run(monkeypatch, "convert", nano_dir, packed, "--recipe", "ffn") == 0
    total = capsys.readouterr().out.splitlines()[-1]
    assert total in said, "explain has foretold it"
    assert run(monkeypatch, "verify", packed) == 0
    assert capsys.readouterr().out.endswith("weights, all as recorded\n")


@pytest.mark.parametrize("nano_dir", ["nano-dense"], indirect=True)
def test_what_convert_would_refuse_is_explained_with_code_2(
    nano_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "explain", nano_dir, "--ignore", "self_atn") == 2
    assert "error: ignore: 'self_atn' matches nothing" in capsys.readouterr().out


Refusal = Callable[..., str]


@pytest.mark.parametrize("nano_dir", ["nano-moe"], indirect=True)
def test_command_line(nano_dir: Path, tmp_path: Path) -> None:
    options = ("--recipe", "ffn", "--format", "modelopt")
    done = module("qat_core.checkpoint convert", nano_dir, tmp_path / "packed", *options)
    assert done.returncode == 0, done.stderr
    convert(nano_dir, tmp_path / "expected", Recipe.ffn(), "modelopt")
    assert contents(tmp_path / "packed") == contents(tmp_path / "expected")


def test_a_folder_that_is_there_is_not_written_over(
    nano_dir: Path, packed_dir: Path, refusal: Refusal
) -> None:
    before = contents(packed_dir)
    said = refusal(
        checkpoint_main, "convert", nano_dir, packed_dir, "--recipe", "ffn", "--format", "modelopt"
    )
    assert said.splitlines()[-1].startswith(f"error: {packed_dir}: exists")
    assert contents(packed_dir) == before


@pytest.mark.parametrize(
    ("pattern", "error"),
    [
        ("re:[", "'re:[' is not a regular expression: unterminated character set at position 0"),
        ("role:mlp", "'role:mlp': the roles are attention"),
    ],
)
def test_a_pattern_that_is_none_is_one_line(
    tmp_path: Path, refusal: Refusal, pattern: str, error: str
) -> None:
    said = refusal(checkpoint_main, "convert", tmp_path, tmp_path / "out", "--ignore", pattern)
    assert said == f"error: --ignore: {error}; correct it\n"


def test_a_pattern_that_matches_nothing_is_one_line(
    nano_dir: Path, tmp_path: Path, refusal: Refusal
) -> None:
    said = refusal(
        checkpoint_main, "convert", nano_dir, tmp_path / "out", "--ignore", "self_attn", "self_atn"
    )
    assert said.startswith(f"error: {nano_dir / 'config.json'}: ignore: 'self_atn' matches nothing")
    assert len(said.splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (positive_int, "1", 1),
        (positive_float, "1e-9", 1e-9),
        (study_seed, "0", 0),
        (study_seed, str(LARGEST_SEED), LARGEST_SEED),
    ],
)
def test_a_number_is_taken(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (positive_int, ["0", "-1", "1.5", "nan", "inf", "", "x", "9" * 5000]),
        (positive_float, ["0", "-1", "nan", "inf", "", "x"]),
        (study_seed, ["-1", str(LARGEST_SEED + 1), "1.5", "nan", ""]),
    ],
)
def test_what_cannot_be_is_refused_with_what_is_needed(
    parse: Callable[[str], float], texts: list[str]
) -> None:
    for text in texts:
        with pytest.raises(ArgumentTypeError, match=r": needs a (whole )?number"):
            parse(text)


def test_a_seed_is_one_that_a_study_may_have() -> None:
    largest = Study.model_json_schema()["properties"]["seeds"]["items"]["exclusiveMaximum"] - 1
    assert largest == LARGEST_SEED
