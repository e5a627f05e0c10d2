"""The table of claims on a terminal."""

from io import StringIO

import pytest
from rich.console import Console

from analysis.claims_table import ClaimsTable, read_table
from analysis.parity.judge import judge_study
from analysis.results import Results
from experiments.study.schema import ROOT, Study

RECORDS = sorted((ROOT / "experiments" / "records").glob("*/claims.json"))


def shown(table: ClaimsTable, with_details: bool = False) -> list[str]:
    text = StringIO()
    table.show(Console(file=text, width=80), with_details)
    return text.getvalue().splitlines()


def test_a_detail_is_no_markup(study: Study, results: Results) -> None:
    table = judge_study(study, results)
    first = table.claims[0].model_copy(update={"detail": "[enforce fail] [/x]"})
    lines = shown(table.model_copy(update={"claims": (first, *table.claims[1:])}), True)
    assert any("[enforce fail] [/x]" in line for line in lines)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_recorded_claims_are_one_line_each(path: object) -> None:
    table = read_table(path)
    num_marks = sum(map(len, table.marks.values()))
    lines = shown(table)
    num_headings = sum("value" in line.split() for line in lines)
    assert len(lines) == len(table.claims) + len(table.marks) + num_marks + num_headings
    assert not any("…" in line for line in lines)
    for claim in table.claims:
        if claim.estimate is not None:
            assert any(claim.shown_estimate in line for line in lines)
