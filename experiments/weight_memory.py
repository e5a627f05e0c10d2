"""`python -m experiments.weight_memory`: predicted and measured weight memory of every run."""

import argparse
from pathlib import Path

from experiments.study.load import load_study
from experiments.support.cli import RESULTS, STUDY, run_cli
from experiments.support.json_files import read_json, write_json


def main() -> None:
    """Gathers the `memory` section of the runs' manifests, all in GiB, by run id."""
    parser = argparse.ArgumentParser(description=__doc__, parents=[STUDY, RESULTS])
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    memory = {
        run.id: read_json(args.results / run.id / "manifest.json")["memory"]
        for run in load_study(args.study).runs
    }
    write_json(args.out, memory)


if __name__ == "__main__":
    run_cli(main)
