"""A study file, read and checked; `python -m experiments.study.load FILE` prints its name."""

import argparse
from pathlib import Path

from experiments.study.checks import failed_checks
from experiments.study.models import MODEL_KINDS
from experiments.study.schema import Study
from experiments.study.yaml_file import parse_yaml_file
from experiments.support.cli import run_cli


def load_study(path: Path) -> Study:
    """Reads and checks a study file."""
    study = parse_yaml_file(path, Study, MODEL_KINDS)
    # the first only: the next ones rely on what it asks for
    for failure in failed_checks(study):
        raise ValueError(f"{path}: {' '.join(failure.splitlines())}")  # values may have lines
    return study


def main() -> None:
    """Prints the name of a study for the Makefile."""
    parser = argparse.ArgumentParser(description="Check a study file and print the study's name.")
    parser.add_argument("study", type=Path, help="study file")
    print(load_study(parser.parse_args().study).study)


if __name__ == "__main__":
    run_cli(main)
