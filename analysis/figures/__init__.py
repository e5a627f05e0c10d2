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

Figure = Callable[..., Canvas]
# of a study and its results
FIGURES: Mapping[str, Figure] = {
    "kl": kl.draw,
    "accuracy": accuracy.draw,
    "learning": learning.draw,
    "training": training.draw,
    "memory": costs.draw_memory,
    "step_time": costs.draw_step_time,
    DRIFT: drift.draw,
}
# of a grid of cells
GRID_FIGURES: Mapping[str, Figure] = {
    "curves": curves.draw,
    "reward": outcomes.draw_reward,
    "survival": outcomes.draw_survival,
    "corrections": outcomes.draw_times,
    "answers": outcomes.draw_answers,
    "behaviour": curves.draw_behaviour,
    "costs": costs.draw_both,
    "causes": causes.draw,
    DRIFT: drift.draw_of_grid,
}
# of the records of servings
BENCHMARK_FIGURES: Mapping[str, Figure] = {
    "qwen3_memory": qwen3.draw_memory,
    "qwen3_rollouts": qwen3.draw_rollouts,
}
assert tuple(FIGURES) == (*KINDS["parity"].figures, DRIFT)
assert tuple(GRID_FIGURES) == (*KINDS["collapse"].figures, DRIFT)


class Drawings(NamedTuple):
    """Figures by name, and by model the drifts that a table shows; none where not watched."""

    figures: Mapping[str, Callable[[], Canvas]]
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
    return Drawings(
        {name: partial(it, *data) for name, it in all_figures.items() if name in names},
        drifts if DRIFT in names else {},
    )
