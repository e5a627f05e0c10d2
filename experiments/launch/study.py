"""`python -m experiments.launch.study FILE [OPTIONS]`: Snakemake on a study, as in `make run`.

Snakemake's own reader names no line of a file that is not YAML, and its own lock takes three lines
to say that the study runs already. Further options are Snakemake's.
"""

import argparse
import fcntl
import os
import sys
from pathlib import Path

from experiments.study.load import load_study
from experiments.support.cli import run_cli


def main() -> None:
    """Checks the file, then becomes Snakemake; the kernel releases the lock however that ends."""
    parser = argparse.ArgumentParser(description="Run a study to its claims and figures.")
    parser.add_argument("study", type=Path, help="study file")
    args, options = parser.parse_known_args()
    folder = Path("results/studies") / load_study(args.study).study
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{folder}: another process makes it; wait for it or end it") from None
    os.set_inheritable(lock, True)
    snakemake = str(Path(sys.executable).parent / "snakemake")
    os.execv(snakemake, [snakemake, "--configfile", str(args.study), *options])


if __name__ == "__main__":
    run_cli(main)
