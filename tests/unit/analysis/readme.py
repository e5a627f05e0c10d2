"""README and docs/results.md as one line each, and what their sentences are compared with."""

from experiments.study.schema import ROOT

RECORDS = ROOT / "experiments" / "records"
TEXT = " ".join((ROOT / "README.md").read_text().split())
RESULTS = " ".join((ROOT / "docs" / "results.md").read_text().split())
COUNTS = {0: "none", 1: "one", 2: "two", 3: "three", 5: "five", 6: "six", 7: "seven", 10: "ten"}
