"""The program that writes the table of planted faults: pages that it refuses."""

import sys
from pathlib import Path

import pytest

from experiments.support.cli import run_cli
from tests.doctor import faults


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("no table", "page.md: has no <!-- begin:faults --> with <!-- end:faults --> after it;"),
        (f"{faults.END} {faults.BEGIN}", "page.md: has no <!-- begin:faults --> with"),
    ],
    ids=["no marks", "wrong order"],
)
def test_a_page_without_the_table_is_refused_before_faults_are_planted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    line: str,
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    monkeypatch.setattr(faults, "table", lambda: pytest.fail("planted faults"))
    monkeypatch.setattr(sys, "argv", ["faults", str(page)])
    with pytest.raises(SystemExit) as ended:
        run_cli(faults.main)
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ") and line in said


def test_a_missing_page_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["faults", "no/page.md"])
    with pytest.raises(SystemExit) as ended:
        run_cli(faults.main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: no/page.md: No such file or directory\n"
