"""Judges a study of collapses: `python -m analysis.collapse --study FILE --results DIR ...`."""

import argparse
from pathlib import Path

from rich.console import Console

from analysis.collapse.judge import write_claims
from analysis.figure_files import load_judged_by
from experiments.support.cli import STUDY, run_cli


def main() -> None:
    """Writes claims.json and claims.md, and prints the claims."""
    parser = argparse.ArgumentParser(description="Judge a study.", parents=[STUDY])
    parser.add_argument("--results", type=Path, required=True, help="results or records folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of claims.json, claims.md")
    arguments = parser.parse_args()
    study = load_judged_by("collapse", arguments.study)
    write_claims(study, arguments.results, arguments.out).show(Console())


if __name__ == "__main__":
    run_cli(main)
