"""Judges a study of collapses: `python -m analysis.collapse --study FILE --results DIR ...`."""

import argparse
from pathlib import Path

from rich.console import Console

from analysis.collapse.judge import judge_study
from analysis.collapse.outcome_table import outcome_table
from experiments.study.load import load_study
from experiments.support.cli import STUDY, run_cli


def main() -> None:
    """Writes claims.json and claims.md, and prints the claims."""
    parser = argparse.ArgumentParser(description="Judge a study.", parents=[STUDY])
    parser.add_argument("--results", type=Path, required=True, help="results or records folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of claims.json, claims.md")
    arguments = parser.parse_args()
    study = load_study(arguments.study)
    table = judge_study(study, arguments.results)
    table.write(arguments.out, f"\n{outcome_table(study, arguments.results)}\n")
    table.show(Console())


if __name__ == "__main__":
    run_cli(main)
