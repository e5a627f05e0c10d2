"""Who judges and draws a study, and the files that its figures are: the workflow reads it too.

Nothing is imported that draws. `python -m analysis.figure_files --study FILE` prints the two
programs of a study for the Makefile.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from experiments.study.arms import ARMS
from experiments.study.load import load_study
from experiments.study.schema import Study
from experiments.support.cli import STUDY, run_cli

FORMATS = ("png", "svg")  # records and pages have the first
NAMES = ("kl", "accuracy", "learning", "training", "memory", "step_time")
DRIFT = "drift"
CAUSES = "causes"
REWARD = "reward"
SURVIVAL = "survival"


class Programs(NamedTuple):
    """How the studies of one kind are judged and drawn.

    Attributes:
        judge: module that writes claims.json and claims.md.
        draw: module that writes the figures.
        protocol: document with the rules, from the repository's root.
        figures: names of the figures, without that of the drift.
    """

    judge: str
    draw: str
    protocol: str
    figures: tuple[str, ...]


PROGRAMS: Mapping[str, Programs] = {
    "parity": Programs(
        "analysis.claims", "analysis.figures.__main__", "docs/protocols/kl-claim.md", NAMES
    ),
    "collapse": Programs(
        "analysis.collapse.__main__",
        "analysis.collapse.figures",
        "docs/protocols/collapse.md",
        ("curves", REWARD, SURVIVAL, "corrections", "answers", "behaviour", "costs", CAUSES),
    ),
}


def load_judged_by(kind: str, path: Path) -> Study:
    """A study, for the programs that judge and draw this kind.

    Raises:
        ValueError: the file is damaged, or other programs judge and draw the study.
    """
    study = load_study(path)
    if study.judged_by != kind:
        judge, draw, *_ = PROGRAMS[study.judged_by]
        judge, draw = (f"python -m {name.removesuffix('.__main__')}" for name in (judge, draw))
        raise ValueError(
            f"{path}: judged_by: {study.judged_by}: judge it with {judge}, draw it with {draw}"
        )
    return study


def figure_names(study: Study) -> tuple[str, ...]:
    """The figures of a study: those of what it asks, compares and measures."""
    rates = {study.rl_of(cell).lr for cell in study.cells or [None]}
    drawn = {
        REWARD: study.primary != "C1" and len(study.seeds) > 1,
        SURVIVAL: len(rates) > 1,
        CAUSES: study.rl.measure_drift_term,
    }
    figures = tuple(it for it in PROGRAMS[study.judged_by].figures if drawn.get(it, True))
    is_watched = study.rl.drift_every and any(ARMS[arm].rollout_recipe for arm in study.arms)
    return (*figures, DRIFT) if is_watched else figures


def parse_drawing() -> argparse.Namespace:
    """The command line of a program that draws: study, results, out and format."""
    parser = argparse.ArgumentParser(description="Draw a study's figures.", parents=[STUDY])
    parser.add_argument("--results", type=Path, required=True, help="results or records folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0])
    return parser.parse_args()


def main() -> None:
    """Prints the modules that judge and draw the study of a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], parents=[STUDY])
    programs = PROGRAMS[load_study(parser.parse_args().study).judged_by]
    print(programs.judge, programs.draw)


if __name__ == "__main__":
    run_cli(main)
