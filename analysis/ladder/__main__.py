"""`python -m analysis.ladder report RECORD ... --out FOLDER` and `rates RECORD`."""

import argparse
from functools import partial
from pathlib import Path

from analysis.ladder.figure import draw
from analysis.ladder.rates import rates_text
from analysis.ladder.rungs import ladder_text, read_rungs
from analysis.style import save_figure
from experiments.support.cli import run_cli


def main() -> None:
    """Parses the command line; prints rates, or writes table and figure of a ladder."""
    parser = argparse.ArgumentParser(description="Judge a ladder of sizes from its records.")
    commands = parser.add_subparsers(required=True, dest="command")
    report = commands.add_parser("report", help="effects by size and their slopes")
    report.add_argument("records", type=Path, nargs="+", help="folders of recorded studies")
    report.add_argument("--out", type=Path, required=True, help="folder of ladder.md, ladder.png")
    rates = commands.add_parser("rates", help="choose the learning rate of each size")
    rates.add_argument("record", type=Path, help="folder of a recorded study of rates")
    args = parser.parse_args()
    if args.command == "rates":
        print(rates_text(args.record), end="")
        return
    rungs = read_rungs(args.records)
    text = ladder_text(rungs)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "ladder.md").write_text(text)
    save_figure(partial(draw, rungs), args.out / "ladder.png")
    print(text, end="")


if __name__ == "__main__":
    run_cli(main)
