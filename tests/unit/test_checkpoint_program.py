"""`python -m qat_core.checkpoint`: packs and verifies, and names mistakes in one line."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qat_core import convert
from qat_core.checkpoint.__main__ import main
from qat_core.planning.recipe import Recipe

Refusal = Callable[..., str]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refusal:
    """What the program says on stderr as it refuses: in this process, which has its modules."""

    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["checkpoint", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        return capfd.readouterr().err

    return call


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("nano_dir", ["nano-moe"], indirect=True)
def test_command_line(nano_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qat_core.checkpoint"]
    packed = str(tmp_path / "packed")
    arguments = ["convert", str(nano_dir), packed, "--recipe", "ffn", "--format", "modelopt"]
    assert subprocess.run([*command, *arguments]).returncode == 0
    convert(nano_dir, tmp_path / "expected", Recipe.ffn(), "modelopt")
    assert contents(tmp_path / "packed") == contents(tmp_path / "expected")


def test_a_folder_that_is_there_is_not_written_over(
    nano_dir: Path, packed_dir: Path, refusal: Refusal
) -> None:
    before = contents(packed_dir)
    said = refusal("convert", nano_dir, packed_dir, "--recipe", "ffn", "--format", "modelopt")
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
    said = refusal("convert", tmp_path, tmp_path / "out", "--ignore", pattern)
    assert said == f"error: --ignore: {error}; correct it\n"


def test_a_pattern_that_matches_nothing_is_one_line(
    nano_dir: Path, tmp_path: Path, refusal: Refusal
) -> None:
    said = refusal("convert", nano_dir, tmp_path / "out", "--ignore", "self_attn", "self_atn")
    assert said.startswith(f"error: {nano_dir / 'config.json'}: ignore: 'self_atn' matches nothing")
    assert len(said.splitlines()) == 1 and not list(tmp_path.iterdir())
