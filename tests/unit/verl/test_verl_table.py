"""Rows of docs/verl.md exist because a test proves them."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")
pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from tests.verl_table import MARKER, PAGE, Proofs, filled, marked_files


def proofs(*tests: tuple[str, list[Any], dict[str, str]]) -> Proofs:
    """Of collected tests: name, marks and parameters."""
    items = [
        SimpleNamespace(
            nodeid=nodeid,
            callspec=SimpleNamespace(params=params),
            iter_markers=lambda _, marks=marks: [mark.mark for mark in marks],
        )
        for nodeid, marks, params in tests
    ]
    found = Proofs()
    found.pytest_collection_finish(SimpleNamespace(items=items))
    return found


def row(*arguments: str, **keywords: Any) -> Any:
    return getattr(pytest.mark, MARKER)(*arguments, **keywords)


def test_the_page_has_the_rows_that_tests_prove(request: pytest.FixtureRequest) -> None:
    """Of the tests of this session: others are not imported for this alone."""
    files = {item.nodeid.partition("::")[0] for item in request.session.items}
    chosen = request.config.option.keyword or request.config.option.markexpr
    if chosen or not marked_files() <= files:
        pytest.skip("not all tests that prove rows are part of this session")
    found = Proofs()
    found.pytest_collection_finish(request.session)
    page = PAGE.read_text()
    assert filled(page, found) == page, "run python -m tests.verl_table"


def test_a_row_names_each_test_once_and_what_is_refused_comes_last() -> None:
    refused, works = row("`a`", "refused"), row("b", "works")
    table = proofs(
        ("tests/test_x.py::test_a[1]", [refused, works], {}),
        ("tests/test_x.py::test_a[2]", [refused, works], {}),
        ("tests/test_x.py::test_b", [works], {}),
        ("tests/test_y.py::test_c", [works], {}),
    ).table()
    assert table.splitlines()[2:] == [
        "| b | works | `tests/test_x.py` (2 tests), `tests/test_y.py` |",
        "| `a` | refused | `tests/test_x.py` |",
    ]


def test_a_case_that_a_row_needs_and_its_test_lacks_is_named() -> None:
    marks = [row("a", "works", cases=["dense", "moe"])]
    dense, moe = (("test_a[x]", marks, {"case": case}) for case in ("dense", "moe"))
    assert proofs(dense, moe).missing == set()
    assert proofs(dense).missing == {"test_a[moe]"}
