"""The figures of a study of any kind and of benchmarks, and how each is drawn."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure as Canvas

from analysis.collapse import causes, curves, outcomes
from analysis.collapse.data import GridData
from analysis.drift.order import Runs
from analysis.figure_files import DRIFT, KINDS, figure_names
from analysis.figures import accuracy, costs, drift, kl, learning, qwen3, training
from analysis.load import load_results
from experiments.study.schema import Study


class Figure(NamedTuple):
    """How a figure is drawn of its data.

    Attributes:
        reads: what it needs of every run besides its manifest: metrics, evals or drift.
    """

    draw: Callable[..., Canvas]
    reads: tuple[str, ...] = ("metrics",)


# of a study and its results
FIGURES: Mapping[str, Figure] = {
    "kl": Figure(kl.draw),
    "accuracy": Figure(accuracy.draw, ("metrics", "evals")),
    "learning": Figure(learning.draw, ("metrics", "evals")),
    "training": Figure(training.draw),
    "memory": Figure(costs.draw_memory, ()),
    "step_time": Figure(costs.draw_step_time),
    DRIFT: Figure(drift.draw, ("drift",)),
}
# of a grid of cells
GRID_FIGURES: Mapping[str, Figure] = {
    "curves": Figure(curves.draw),
    "reward": Figure(outcomes.draw_reward),
    "survival": Figure(outcomes.draw_survival),
    "corrections": Figure(outcomes.draw_times),
    "answers": Figure(outcomes.draw_answers, ("metrics", "evals")),
    "behaviour": Figure(curves.draw_behaviour),
    "costs": Figure(costs.draw_both),
    "causes": Figure(causes.draw),
    DRIFT: Figure(drift.draw_of_grid, ("drift",)),
}
# of the records of servings
BENCHMARK_FIGURES: Mapping[str, Figure] = {
    "qwen3_memory": Figure(qwen3.draw_memory),
    "qwen3_rollouts": Figure(qwen3.draw_rollouts),
}
assert tuple(FIGURES) == (*KINDS["parity"].figures, DRIFT)
assert tuple(GRID_FIGURES) == (*KINDS["collapse"].figures, DRIFT)


class Drawings(NamedTuple):
    """The figures by name, and by model the drifts that a table shows; none where not watched.

    Attributes:
        figures: each draws all that it needs by itself.
        modules: what draws each.
    """

    figures: Mapping[str, Figure]
    modules: Mapping[str, str]
    drift: Mapping[str, Callable[[], Runs]]


def drawings(study: Study, folder: Path) -> Drawings:
    """All that is drawn of a study."""
    data: tuple[Any, ...]
    drifts: dict[str, Callable[[], Runs]]
    if study.judged_by == "collapse":
        grid = GridData(study, folder)
        all_figures, data = GRID_FIGURES, (grid,)
        drifts = {grid.design.dense: partial(drift.runs_of_grid, grid)}
    else:
        results = load_results(study, folder)
        all_figures, data = FIGURES, (study, results)
        drifts = {it: partial(drift.runs_by_arm, study, results, it) for it in study.models}
    names = figure_names(study)
    found = {name: it for name, it in all_figures.items() if name in names}
    return Drawings(
        {name: it._replace(draw=partial(it.draw, *data)) for name, it in found.items()},
        {name: it.draw.__module__ for name, it in found.items()},
        drifts if DRIFT in names else {},
    )
