"""Draws a study's figures: `python -m analysis.figures --study FILE --results DIR --out DIR`."""

from functools import partial

from analysis.figure_files import figure_names, load_judged_by, parse_drawing
from analysis.figures import FIGURES
from analysis.load import load_results
from analysis.style import save_figure
from experiments.support.cli import run_cli


def main() -> None:
    """Writes each figure."""
    arguments = parse_drawing()
    study = load_judged_by("parity", arguments.study)
    results = load_results(study, arguments.results)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in figure_names(study):
        path = arguments.out / f"{name}.{arguments.format}"
        save_figure(partial(FIGURES[name].draw, study, results), path)


if __name__ == "__main__":
    run_cli(main)
