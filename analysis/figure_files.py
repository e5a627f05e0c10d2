"""Who judges and draws a study, and the files that its figures are: the workflow reads it too.

Nothing is imported that draws.
"""

from collections.abc import Mapping
from typing import NamedTuple

from experiments.study.arms import ARMS
from experiments.study.schema import Study

FORMATS = ("png", "svg")
NAMES = ("kl", "accuracy", "learning", "training", "memory", "step_time")
DRIFT = "drift"


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
        "analysis.collapse",
        "analysis.collapse_figures",
        "docs/protocols/collapse.md",
        ("curves", "survival", "corrections"),
    ),
}


def figure_names(study: Study) -> tuple[str, ...]:
    """The figures of a study; the drift's is one where its runs watch it."""
    figures = PROGRAMS[study.judged_by].figures
    is_watched = study.rl.drift_every and any(ARMS[arm].rollout_recipe for arm in study.arms)
    return (*figures, DRIFT) if is_watched else figures
