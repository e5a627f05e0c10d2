"""Links of the pages lead to a file that is there, and to a heading of it."""

import re
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from experiments.study.schema import ROOT

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
