"""Simulates studies and writes the record: `python -m analysis.simulation [--out FILE]`.

docs/protocols/kl-claim.md and docs/statistics.md say what was concluded from it.
"""

import argparse
import json
from pathlib import Path

from analysis.simulation.accuracy import ACCURACY, MARGIN, simulate_accuracy
from analysis.simulation.ratios import BOUND, STUDIES, simulate_ratios
from analysis.simulation.rewards import simulate_rewards
from experiments.study.schema import ROOT
from experiments.support.cli import run_cli

RECORD = ROOT / "experiments" / "records" / "simulation" / "intervals.json"


def main() -> None:
    """Writes the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RECORD)
    out: Path = parser.parse_args().out
    record = {
        "simulation": "intervals of ratios of mean k3 KL, of accuracies and of mean rewards",
        "bound": BOUND,
        "studies": STUDIES,
        "ratios": simulate_ratios(),
        "accuracy": {
            "margin_log_odds": MARGIN,
            "accuracy": ACCURACY,
            "scenarios": simulate_accuracy(),
        },
        "rewards": simulate_rewards(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    run_cli(main)
