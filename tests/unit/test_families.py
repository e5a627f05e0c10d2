"""docs/families.md says what happens with each family of models."""

import re

import pytest
import torch
import transformers

from experiments.study.schema import ROOT
from tests.families import FAMILIES, SERVED
from tests.family_checks import (
    DTYPES_HEADER,
    HEADER,
    YES,
    check_family,
    dtype_rows,
    summary,
)

PAGE = ROOT / "docs" / "families.md"
of_the_tables_version = pytest.mark.skipif(
    not transformers.__version__.startswith("5.10."), reason="the table is of transformers 5.10"
)
ASKED_FOR = ("mixtral", "olmoe", "deepseek_v3", "glm4_moe", "deepseek_v2", "qwen3_next")


@pytest.fixture(scope="module")
def documented() -> dict[str, str]:
    """Lines of the table by family."""
    text = PAGE.read_text().partition(DTYPES_HEADER)[0]
    assert text.startswith(HEADER), "make it again: python -m tests.family_checks"
    lines = re.findall(r"^(\| (\S+) .*)$", text.removeprefix(HEADER), re.M)
    return {family: line for line, family in lines}


def documented_dtypes(family: str) -> list[str]:
    """A family's lines of the second table."""
    text = PAGE.read_text().partition(DTYPES_HEADER)[2]
    return [line for line in text.splitlines() if line.startswith(f"| {family} ")]


@of_the_tables_version
def test_every_family_of_transformers_is_in_the_table(documented: dict[str, str]) -> None:
    assert list(documented) == list(FAMILIES)


def test_the_table_ends_with_how_many_families_do_what(documented: dict[str, str]) -> None:
    assert f"|\n\n{summary(documented.values())}\n{DTYPES_HEADER}" in PAGE.read_text()


def test_what_users_ask_for_trains_streams_exports_and_converts(
    documented: dict[str, str],
) -> None:
    for family in ASKED_FOR:
        assert documented[family].count(f" {YES} ") >= 4, documented[family]
    assert all(documented[family].endswith(f" {YES} |") for family in SERVED)


@pytest.mark.long
@of_the_tables_version
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tables_lines_are_what_happens(family: str, documented: dict[str, str]) -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models are too small for more
    try:
        found = check_family(family)
        assert str(found) == documented[family]
        assert documented_dtypes(family) == (dtype_rows(family) if found.trains else [])
    finally:
        torch.set_num_threads(num_threads)
