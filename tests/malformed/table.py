"""`python -m tests.malformed.table [CASES]`: docs/reliability.md's table of cases and outcomes."""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import get_args

from experiments.study.schema import ROOT
from qat_core.arguments import positive_int
from tests.malformed.kind import Outcome, try_once

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- begin: malformed input -->", "<!-- end: malformed input -->"
OUTCOMES = get_args(Outcome)


def count(num_cases: int) -> dict[str, Counter[Outcome]]:
    """Outcomes of so many random cases of each kind; prints what should not happen."""
    from tests.malformed.kinds import KINDS  # torch: not for help

    counts: dict[str, Counter[Outcome]] = {}
    for name, kind in KINDS.items():
        counts[name] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            original, copy = Path(folder) / "original", Path(folder) / "copy"
            original.mkdir()
            kind.make(original)
            for case in range(num_cases):
                outcome, said = try_once(kind, original, copy, Random(f"{name} {case}"))
                counts[name][outcome] += 1
                if outcome in ("unclear", "traceback"):
                    print(f"{name}, case {case}: {outcome}: {said}", file=sys.stderr)
        print(name, dict(counts[name]), flush=True)
    return counts


def to_markdown(counts: dict[str, Counter[Outcome]]) -> str:
    """One row per kind and one of all."""
    total = sum(counts.values(), Counter())
    header = ["input", "cases", *OUTCOMES]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    for name, outcomes in (*counts.items(), ("all", total)):
        numbers = [outcomes.total(), *(outcomes[outcome] for outcome in OUTCOMES)]
        rows.append([name, *map(str, numbers)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Counts, and replaces the table between the page's two marks."""
    parser = argparse.ArgumentParser(description="Count what becomes of malformed input.")
    parser.add_argument(
        "cases", type=positive_int, nargs="?", default=200, help="cases of each kind"
    )
    num_cases = parser.parse_args().cases
    table = to_markdown(count(num_cases))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    main()
