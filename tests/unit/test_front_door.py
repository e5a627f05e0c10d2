"""README: short, and what it says to run runs as it stands."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from analysis.tables.front import EXACT, front_text
from experiments.base.random_model import write_architecture
from experiments.study.schema import ROOT
from experiments.support.json_files import read_json

RECORDS = ROOT / "experiments" / "records"
TEXT = (ROOT / "README.md").read_text()
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n\n```\w*\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))


def test_it_is_read_in_a_few_minutes() -> None:
    assert len(TEXT.splitlines()) <= 110 and len(TEXT.split()) <= 900
    prose = re.sub(r"```.*?```|^[|!].*?$|\]\([^)]*\)", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    sentences = re.split(r"[.:;]\s|\n\n|\n\* ", prose)
    assert [it for it in sentences if len(re.findall(r"(?<![\w.])\d[\d.,]*", it)) > 2] == []


def test_the_row_of_the_exact_mode_is_there_when_its_record_is(tmp_path: Path) -> None:
    for name in ("collapse-smollm2-confirm/claims.json", "benchmarks"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (RECORDS / name).is_dir() else shutil.copy
        copy(RECORDS / name, tmp_path / name)
    record = tmp_path / "benchmarks" / EXACT
    record.unlink()
    assert "Exact mode" not in front_text(tmp_path)
    rows = [(1200, 0, True), (300, 0, True), (500, 77, False)]
    keys = ("tokens", "unequal", "expected_zero")
    record.write_text(
        json.dumps({"comparisons": [dict(zip(keys, row, strict=True)) for row in rows]})
    )
    assert "differ in any bit | **0** | of 1,500 |" in front_text(tmp_path)
    assert len(re.findall(r"^\| [^W-]", front_text(tmp_path), re.MULTILINE)) <= 8


@pytest.mark.parametrize("nano_dir", ["nano-dense"], indirect=True)
def test_the_loop_runs_with_its_engine(
    nano_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name: str(nano_dir))
    example = BLOCKS["Your own loop"]
    assert len(example.splitlines()) <= 18
    exec(example, {})
    assert "tensor([[-" in capsys.readouterr().out


def test_verl_takes_the_command_and_the_run_says_the_line_below_it(
    tmp_path: Path,
) -> None:
    pytest.importorskip("verl", reason="needs requirements/engines.txt")
    command, _, line = BLOCKS["Your verl run"].partition("# ")
    config = read_json(ROOT / "experiments" / "models" / "qwen3-8b.json")
    write_architecture(config, tmp_path / "model")
    command = command.replace("\\\n", "").replace("Qwen/Qwen3-8B-Base", str(tmp_path / "model"))
    check = [sys.executable, "-m", "qat_core.cli", "verl-check", *shlex.split(command)]
    ran = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.startswith(line.strip().removesuffix("...")), ran.stderr
