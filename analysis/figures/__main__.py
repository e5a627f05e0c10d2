"""Draws a study's figures: `python -m analysis.figures --study FILE --results DIR --out DIR`."""

import argparse
from pathlib import Path

from analysis.figure_files import FORMATS
from analysis.figures import drawings
from analysis.style import save_figure
from experiments.study.load import load_study
from experiments.support.cli import STUDY, run_cli


def main() -> None:
    """Writes each figure."""
    parser = argparse.ArgumentParser(description="Draw a study's figures.", parents=[STUDY])
    parser.add_argument("--results", type=Path, required=True, help="results or records folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0])
    args = parser.parse_args()
    figures = drawings(load_study(args.study), args.results).figures
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in figures.items():
        save_figure(draw, args.out / f"{name}.{args.format}")


if __name__ == "__main__":
    run_cli(main)
