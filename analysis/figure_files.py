"""The files that a study's figures are: the workflow reads it too, so nothing here draws."""

from collections.abc import Mapping
from typing import NamedTuple

from experiments.study.arms import ARMS
from experiments.study.schema import Study

FORMATS = ("png", "svg")  # records and pages have the first
NAMES = ("kl", "accuracy", "learning", "training", "memory", "step_time")
DRIFT = "drift"
CAUSES = "causes"
REWARD = "reward"
SURVIVAL = "survival"
MANY_SEEDS = 12  # more lines in one panel show nothing


class Kind(NamedTuple):
    """What the studies of one kind have.

    Attributes:
        protocol: document with the rules, from the repository's root.
        figures: names of the figures, without that of the drift.
    """

    protocol: str
    figures: tuple[str, ...]


KINDS: Mapping[str, Kind] = {
    "parity": Kind("docs/protocols/kl-claim.md", NAMES),
    "collapse": Kind(
        "docs/protocols/collapse.md",
        ("curves", REWARD, SURVIVAL, "corrections", "answers", "behaviour", "costs", CAUSES),
    ),
}


def figure_names(study: Study) -> tuple[str, ...]:
    """The figures of a study: those of what it asks, compares and measures."""
    rates = {study.rl_of(cell).lr for cell in study.cells or [None]}
    drawn = {
        REWARD: study.primary != "C1" and len(study.seeds) > 1,
        SURVIVAL: len(rates) > 1 or len(study.seeds) > MANY_SEEDS,
        CAUSES: study.rl.measure_drift_term,
    }
    figures = tuple(it for it in KINDS[study.judged_by].figures if drawn.get(it, True))
    is_watched = study.rl.drift_every and any(ARMS[arm].rollout_recipe for arm in study.arms)
    return (*figures, DRIFT) if is_watched else figures
