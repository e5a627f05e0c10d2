"""Draws a study's figures: `python -m analysis.figures --study FILE --results DIR --out DIR`."""

import argparse
from functools import partial
from pathlib import Path

from analysis.figure_files import FORMATS, figure_names, load_judged_by
from analysis.figures import FIGURES
from analysis.load import load_results
from analysis.style import save_figure
from experiments.support.cli import STUDY, run_cli


def main() -> None:
    """Writes a PNG and an SVG of each figure."""
    parser = argparse.ArgumentParser(description="Draw a study's figures.", parents=[STUDY])
    parser.add_argument("--results", type=Path, required=True, help="results or records folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the PNG and SVG files")
    arguments = parser.parse_args()
    study = load_judged_by("parity", arguments.study)
    results = load_results(study, arguments.results)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in figure_names(study):
        paths = [arguments.out / f"{name}.{kind}" for kind in FORMATS]
        save_figure(partial(FIGURES[name].draw, study, results), *paths)


if __name__ == "__main__":
    run_cli(main)
