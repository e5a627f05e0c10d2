"""`python -m experiments.launch.study FILE [OPTIONS]`: Snakemake on a study, as in `make run`.

Snakemake's own reader names no line of a file that is not YAML, and its own lock takes three lines
to say that the study runs already. Further options are Snakemake's.
"""

import argparse
from pathlib import Path

from snakemake.cli import main as snakemake

from experiments.study.load import load_study
from experiments.support.cli import run_cli
from experiments.support.sole_process import sole_process


def main() -> None:
    """Checks the file, then is Snakemake while nobody else makes the study."""
    parser = argparse.ArgumentParser(description="Run a study to its claims and figures.")
    parser.add_argument("study", type=Path, help="study file")
    args, options = parser.parse_known_args()
    folder = Path("results/studies") / load_study(args.study).study
    with sole_process(folder / "lock", folder, "makes"):
        snakemake(["--configfile", str(args.study), *options])


if __name__ == "__main__":
    run_cli(main)
