"""`qat-core`: each command, its help, and what a mistake ends with."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from qat_core.cli import COMMANDS, main


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


HELP = """
import sys
from qat_core.cli import COMMANDS, main
for command in COMMANDS:
    sys.argv[1:] = [command, "--help"]
    try:
        main()
    except SystemExit:
        print("loaded by", command, {"torch", "transformers", "hydra", "verl"} & {*sys.modules})
"""


def test_help_imports_nothing_slow() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    loaded = [line for line in done.stdout.splitlines() if line.startswith("loaded by")]
    assert loaded == [f"loaded by {command} set()" for command in COMMANDS]


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
