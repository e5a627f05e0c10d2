"""Pages of docs as one line each, and what their sentences are compared with."""

import json
from typing import Any

from experiments.study.schema import ROOT

RECORDS = ROOT / "experiments" / "records"


def one_line(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def benchmark(name: str) -> Any:
    return json.loads((RECORDS / "benchmarks" / f"{name}.json").read_text())


RESULTS = one_line("docs/results.md")
TEXT = f"{RESULTS} {one_line('docs/performance.md')}"
COUNTS = {
    0: "none",
    1: "one",
    2: "two",
    3: "three",
    4: "four",
    5: "five",
    6: "six",
    7: "seven",
    10: "ten",
}
