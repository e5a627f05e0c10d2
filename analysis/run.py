"""A study from its file to the claims on the terminal, as `make run`: `python -m analysis.run`."""

import argparse
from pathlib import Path

from analysis.claims_table import show_file
from experiments.launch.study import make_study
from experiments.support.cli import run_cli


def main() -> None:
    """Makes the study, shows its claims, and says where all else is."""
    parser = argparse.ArgumentParser(description="Run a study and show its claims.")
    parser.add_argument("study", type=Path, help="study file")
    folder = make_study(parser.parse_args().study)
    show_file(folder / "claims.json")
    print(f"claims.md, figures and report.html: {folder}; runs in MLflow: make ui")


if __name__ == "__main__":
    run_cli(main)
