"""docs/errors.md: each error is one that the library can give, in these words."""

import ast
import re
from collections.abc import Iterator

import pytest

from experiments.study.schema import ROOT

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
