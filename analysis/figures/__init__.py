"""The figures of a study, one module each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure as Canvas

from analysis.figure_files import NAMES
from analysis.figures import accuracy, kl, learning, memory, step_time, training
from analysis.results import Results
from experiments.study.schema import Study


@dataclass(frozen=True)
class StudyFigure:
    """How a figure is drawn, and what it shows."""

    draw: Callable[[Study, Results], Canvas]
    caption: str


FIGURES: Mapping[str, StudyFigure] = {
    "kl": StudyFigure(kl.draw, kl.CAPTION),
    "accuracy": StudyFigure(accuracy.draw, accuracy.CAPTION),
    "learning": StudyFigure(learning.draw, learning.CAPTION),
    "training": StudyFigure(training.draw, training.CAPTION),
    "memory": StudyFigure(memory.draw, memory.CAPTION),
    "step_time": StudyFigure(step_time.draw, step_time.CAPTION),
}
assert tuple(FIGURES) == NAMES
