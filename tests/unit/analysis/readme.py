"""README and pages of docs as one line each, and what their sentences are compared with."""

import json
from typing import Any

from experiments.study.schema import ROOT

RECORDS = ROOT / "experiments" / "records"


def one_line(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def benchmark(name: str) -> Any:
    return json.loads((RECORDS / "benchmarks" / f"{name}.json").read_text())


TEXT, RESULTS = one_line("README.md"), one_line("docs/results.md")
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
