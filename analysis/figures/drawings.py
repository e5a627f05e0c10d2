"""The figures of a study of any kind, ready to be drawn from its results or its record."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from analysis.collapse.data import GridData
from analysis.collapse.figures import FIGURES as GRID_FIGURES
from analysis.collapse.figures import drift_runs
from analysis.drift.order import Runs
from analysis.figure_files import DRIFT, figure_names
from analysis.figures import FIGURES
from analysis.figures.drift import runs_by_arm
from analysis.load import load_results
from experiments.study.schema import Study


class Drawing(NamedTuple):
    """One figure.

    Attributes:
        module: what draws it.
        reads: what it needs of every run besides its manifest: metrics, evals or drift.
    """

    draw: Callable[[], Figure]
    module: str
    caption: str
    reads: tuple[str, ...]


class Drawings(NamedTuple):
    """The figures by name, and by model the drifts that a table shows; none where not watched."""

    figures: Mapping[str, Drawing]
    drift: Mapping[str, Callable[[], Runs]]


def drawings(study: Study, folder: Path) -> Drawings:
    """All that is drawn of a study.

    Raises:
        ValueError: a run is missing or damaged.
    """
    all_figures: Mapping[str, Any]
    data: tuple[Any, ...]
    drift: dict[str, Callable[[], Runs]]
    if study.judged_by == "collapse":
        grid = GridData(study, folder)
        all_figures, data = GRID_FIGURES, (grid,)
        drift = {grid.design.dense: partial(drift_runs, grid)}
    else:
        results = load_results(study, folder)
        all_figures, data = FIGURES, (study, results)
        drift = {model: partial(runs_by_arm, study, results, model) for model in study.models}
    names = figure_names(study)
    figures = {
        name: Drawing(partial(it.draw, *data), it.draw.__module__, it.caption, it.reads)
        for name, it in all_figures.items()
        if name in names
    }
    return Drawings(figures, {model: drift[model] for model in drift if DRIFT in names})
