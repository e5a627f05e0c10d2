"""The figures of a study, one module each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure as Canvas

from analysis.figure_files import DRIFT, NAMES
from analysis.figures import accuracy, drift, kl, learning, memory, step_time, training
from analysis.results import Results
from experiments.study.schema import Study


@dataclass(frozen=True)
class StudyFigure:
    """How a figure is drawn, and what it shows.

    Attributes:
        reads: what it needs of every run besides its manifest: metrics, evals or drift.
    """

    draw: Callable[[Study, Results], Canvas]
    caption: str
    reads: tuple[str, ...]


FIGURES: Mapping[str, StudyFigure] = {
    "kl": StudyFigure(kl.draw, kl.CAPTION, ("metrics",)),
    "accuracy": StudyFigure(accuracy.draw, accuracy.CAPTION, ("metrics", "evals")),
    "learning": StudyFigure(learning.draw, learning.CAPTION, ("metrics", "evals")),
    "training": StudyFigure(training.draw, training.CAPTION, ("metrics",)),
    "memory": StudyFigure(memory.draw, memory.CAPTION, ()),
    "step_time": StudyFigure(step_time.draw, step_time.CAPTION, ("metrics",)),
    DRIFT: StudyFigure(drift.draw, drift.CAPTION, ("drift",)),
}
assert tuple(FIGURES) == (*NAMES, DRIFT)
