"""The table of docs/verl.md, from the tests that prove it: `python -m tests.verl_table`.

A marker on a test is the proof of a row, several tests may prove one row, and one test several:

    @pytest.mark.verl_table("`rollout.dtype` other than `bfloat16`", "refused", cases=["dtype"])

`cases` are values of the test's parameters which the row needs: without one of them there is no
table.
"""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest

from analysis.markdown import markdown_table
from experiments.study.schema import ROOT
from experiments.support.cli import run_cli

PAGE = ROOT / "docs" / "verl.md"
MARKER = "verl_table"
BLOCK = re.compile(r"(?<=<!-- verl_table -->\n\n).*?(?=\n\n<!-- end verl_table -->)", re.DOTALL)


class Row(NamedTuple):
    """What a test proves of a verl command with `+nvfp4=w4a16`."""

    command: str
    outcome: str


def cells(row: Row, files: Mapping[str, int]) -> dict[str, str]:
    proofs = (f"`{file}`" + (f" ({n} tests)" if n > 1 else "") for file, n in files.items())
    return {
        "in a verl command": row.command,
        "with `+nvfp4=w4a16`": row.outcome,
        "proof": ", ".join(proofs),
    }


class Proofs:
    """A plugin of pytest's: the rows that the collected tests prove.

    Attributes:
        tests: by row, the names of its tests, each once for all its parameters.
        missing: cases that a row needs and its test does not have, as TEST[CASE].
    """

    def __init__(self) -> None:
        self.tests: defaultdict[Row, set[str]] = defaultdict(set)
        self.missing: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Called by pytest."""
        found = set()
        for item in session.items:
            test = item.nodeid.partition("[")[0]
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            found |= {f"{test}[{value}]" for value in parameters.values()}
            for mark in item.iter_markers(MARKER):
                self._note(test, *mark.args, **mark.kwargs)
        self.missing -= found

    def _note(self, test: str, command: str, outcome: str, cases: Sequence[str] = ()) -> None:
        self.tests[Row(command, outcome)].add(test)
        self.missing |= {f"{test}[{case}]" for case in cases}

    def table(self) -> str:
        """What works comes first, then what is refused; each in the order of the alphabet."""
        rows = sorted(
            self.tests, key=lambda row: (row.outcome.startswith("refused"), _letters(row))
        )
        files = [Counter(_file(test) for test in sorted(self.tests[row])) for row in rows]
        return markdown_table(map(cells, rows, files))


def _letters(row: Row) -> str:
    return row.command.replace("`", "").casefold()


def _file(test: str) -> str:
    return test.partition("::")[0]


def marked_files() -> set[str]:
    """Files of tests that prove rows, by their paths in the repository."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if f"mark.{MARKER}(" in path.read_text()
    }


def collect() -> Proofs:
    """The rows of all tests.

    Raises:
        ValueError: a file with markers cannot be collected here.
    """
    files = [str(ROOT / file) for file in sorted(marked_files())]
    proofs = Proofs()
    options = ["--collect-only", "-qq", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    if code := pytest.main([*options, *files], [proofs]):
        raise ValueError(f"pytest ended with {code}; its output says why")
    return proofs


def filled(page: str, proofs: Proofs) -> str:
    """The page with the table that these tests prove.

    Raises:
        ValueError: a file with markers was not collected, a test lacks a case, or the page has not
            one place for the table.
    """
    collected = {_file(test) for tests in proofs.tests.values() for test in tests}
    if skipped := marked_files() - collected:
        raise ValueError(f"{', '.join(sorted(skipped))}: skipped; needs requirements/engines.txt")
    if proofs.missing:
        raise ValueError(f"{', '.join(sorted(proofs.missing))}: no such case; its row needs it")
    text, blocks = BLOCK.subn(lambda _: proofs.table(), page)
    if blocks != 1:
        name = PAGE.relative_to(ROOT)
        raise ValueError(f"{name}: {blocks} tables between <!-- verl_table --> and its end, not 1")
    return text


def main() -> None:
    """Writes the table into the page."""
    argparse.ArgumentParser(description="Fill the table of docs/verl.md from tests.").parse_args()
    PAGE.write_text(filled(PAGE.read_text(), collect()))


if __name__ == "__main__":
    run_cli(main)
