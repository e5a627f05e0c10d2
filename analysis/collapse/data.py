"""The runs of a grid of cells, as its figures read them."""

from functools import cache, cached_property
from pathlib import Path

import numpy as np

from analysis.collapse.grid import (
    NOQAT,
    Grid,
    Setting,
    design_of,
    read_grid,
    runs_by_setting,
    show_correction,
)
from analysis.load import HINT, metric_of, read_metrics
from analysis.results import Array
from analysis.style import CORRECTED, ArmStyle, arm_style
from experiments.runs.manifest import WeightMemory, read_manifest
from experiments.study.schema import Study


def show_arm(setting: Setting) -> str:
    """The arm, with its correction where it has one."""
    return ", ".join(filter(None, (arm_style(setting.arm).label, show_correction(setting))))


def style_of(setting: Setting) -> ArmStyle:
    """How its runs are drawn: without QAT a correction has a look of its own."""
    is_corrected = setting.arm == NOQAT and show_correction(setting)
    return CORRECTED if is_corrected else arm_style(setting.arm)


class GridData:
    """All complete cells of a study, in a results or records folder."""

    def __init__(self, study: Study, results: Path) -> None:
        self.study, self.results = study, results
        self.design = design_of(study)
        # a figure asks for several metrics of a run
        self._frame = cache(lambda run_id: read_metrics(results / run_id))
        self.runs = runs_by_setting(study, results)
        if not self.runs:
            raise ValueError(
                f"{results}: no cell of study {study.study} has all its runs at their last step; "
                "run the study"
            )

    @cached_property
    def grid(self) -> Grid:
        """Outcomes of all settings."""
        return read_grid(self.runs, self.results)

    @property
    def lrs(self) -> tuple[float, ...]:
        """The learning rates at which an arm has been run, ascending; all if none has."""
        at = {it.lr for it in self.runs if it == self.design.plain(it.arm, it.lr)}
        return tuple(lr for lr in self.design.lrs if lr in at) or self.design.lrs

    def series(self, setting: Setting, metric: str) -> Array:
        """One metric as float64 (seeds, steps); NaN where it is undefined."""
        columns = (metric_of(self._frame(it.id), metric, it.id) for it in self.runs[setting])
        return np.stack([it.to_numpy(float) for it in columns])

    def records(self, setting: Setting, metric: str) -> bool:
        """Whether all its runs have a metric."""
        return all(metric in self._frame(run.id) for run in self.runs[setting])

    def memory(self, setting: Setting) -> WeightMemory:
        """Weight memory of its first run."""
        return read_manifest(self.results / self.runs[setting][0].id, HINT).memory
