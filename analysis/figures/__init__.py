"""The figures of a study, one module each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure as Canvas

from analysis.figures import accuracy, kl, memory, reward
from analysis.results import Results
from experiments.study.schema import Study


@dataclass(frozen=True)
class StudyFigure:
    """How a figure is drawn, and what it shows."""

    draw: Callable[[Study, Results], Canvas]
    caption: str


FIGURES: Mapping[str, StudyFigure] = {
    "kl": StudyFigure(kl.draw, kl.CAPTION),
    "reward": StudyFigure(reward.draw, reward.CAPTION),
    "accuracy": StudyFigure(accuracy.draw, accuracy.CAPTION),
    "memory": StudyFigure(memory.draw, memory.CAPTION),
}
