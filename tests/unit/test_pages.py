"""The pages: links that lead somewhere, errors in these words, proven rows, commands that run."""

import ast
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import huggingface_hub
import pytest

from analysis.tables.front import EXACT, front_text
from experiments.base.random_model import write_architecture
from experiments.study.schema import ROOT
from experiments.support.json_files import read_json
from tests import verl_table
from tests.workflow.programs import module

RECORDS = ROOT / "experiments" / "records"
TEXT = (ROOT / "README.md").read_text()
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n\n```\w*\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))


def test_it_is_read_in_a_few_minutes() -> None:
    assert len(TEXT.splitlines()) <= 110 and len(TEXT.split()) <= 900
    prose = re.sub(r"```.*?```|^[|!].*?$|\]\([^)]*\)", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    sentences = re.split(r"\.\s|\n\n|\n\* ", prose)
    assert [it for it in sentences if len(re.findall(r"(?<![\w.])\d[\d.,]*", it)) > 2] == []


def test_the_row_of_the_exact_mode_is_there_when_its_record_is(tmp_path: Path) -> None:
    for name in ("collapse-smollm2-confirm/claims.json", "benchmarks"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (RECORDS / name).is_dir() else shutil.copy
        copy(RECORDS / name, tmp_path / name)
    for record in (tmp_path / "benchmarks").glob(EXACT):
        record.unlink()
    assert "differ in any bit" not in front_text(tmp_path)
    rows = [(1200, 0, True), (300, 0, True), (500, 77, False)]
    keys = ("tokens", "unequal", "expected_zero")
    for gpus, of_record in (("", rows[:1]), ("x2", rows[1:])):
        comparisons = [dict(zip(keys, row, strict=True)) for row in of_record]
        path = tmp_path / "benchmarks" / EXACT.replace("*", gpus)
        path.write_text(json.dumps({"columns": {}, "comparisons": comparisons}))
    assert "differ in any bit | **0** | of 1,500 compared |" in front_text(tmp_path)
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


def test_verl_takes_the_command_and_the_run_says_the_line_below_it(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="needs requirements/engines.txt")
    command, _, line = BLOCKS["Your verl run"].partition("# ")
    config = read_json(ROOT / "experiments" / "models" / "qwen3-8b.json")
    write_architecture(config, tmp_path / "model")
    command = command.replace("\\\n", "").replace("Qwen/Qwen3-8B-Base", str(tmp_path / "model"))
    ran = module("qat_core.cli verl-check", *shlex.split(command))
    assert ran.stdout.startswith(line.strip().removesuffix("...")), ran.stderr


FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)


def tracked(pattern: str) -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", pattern]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


@cache
def anchors(page: Path) -> set[str]:
    """As GitHub names headings; the second of a name has -1, the third -2."""
    names: list[str] = []
    found = set()
    for heading in re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{name}-{again}" if (again := names.count(name)) else name)
        names.append(name)
    return found


@pytest.mark.parametrize("page", tracked("*.md"), ids=lambda it: str(it.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = CODE.sub("", FENCED.sub("", page.read_text()))
    for target in ("".join(groups) for groups in LINK.findall(text)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / unquote(name)).resolve() if name else page
        assert file.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading"


SHOWN = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
GAP = "…"


def texts() -> Iterator[str]:
    for file in (ROOT / "qat_core").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (it.value if isinstance(it, ast.Constant) else GAP for it in node.values)
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


IN_CODE = list(texts())


@pytest.mark.parametrize("shown", SHOWN)
def test_the_error_is_in_the_code(shown: str) -> None:
    assert any(shown in text for text in IN_CODE)


def test_the_page_has_errors_of_each_part() -> None:
    assert len(SHOWN) > 15


def test_the_page_has_the_rows_that_tests_prove(request: pytest.FixtureRequest) -> None:
    """Of the tests of this session: others are not imported for this alone."""
    for package in ("verl", "vllm"):
        pytest.importorskip(package, reason="needs requirements/engines.txt")
    files = {item.nodeid.partition("::")[0] for item in request.session.items}
    chosen = request.config.option.keyword or request.config.option.markexpr
    if chosen or not verl_table.marked_files() <= files:
        pytest.skip("not all tests that prove rows are part of this session")
    found = verl_table.Proofs()
    found.pytest_collection_finish(request.session)
    page = verl_table.PAGE.read_text()
    assert verl_table.filled(page, found) == page, "run python -m tests.verl_table"
