"""Rows of docs/verl.md exist because a test proves them."""

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")
pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from tests.verl_table import PAGE, Proofs, filled, marked_files


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
