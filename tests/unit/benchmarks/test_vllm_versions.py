"""The record of vLLM's versions: what is read of pytest's report, and what the page says."""

import json
from pathlib import Path

from experiments.study.schema import ROOT
from tests.integration.vllm_versions import RECORD, outcomes, table

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="passes"/>
<testcase classname="a" name="is skipped"><skipped message="needs a GPU"/></testcase>
<testcase classname="a" name="is skipped too"><skipped message="needs a GPU"/></testcase>
<testcase classname="a" name="fails"><failure message="no"/></testcase>
<testcase classname="b" name="breaks"><error message="no fixture"/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_counted_and_failures_named(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(REPORT)
    assert outcomes(tmp_path / "junit.xml") == {
        "passed": 1,
        "skipped": {"needs a GPU": 2},
        "failed": ["a.fails", "b.breaks"],
    }


def test_the_page_says_what_was_recorded() -> None:
    page = (ROOT / "docs" / "verl.md").read_text()
    found = page.partition("<!-- versions -->")[2].partition("<!-- end versions -->")[0]
    assert found.strip() == table(json.loads(RECORD.read_text())["versions"].values())
