"""The arms of a study in a few numbers each, over the seeds that there are."""

from pathlib import Path

import numpy as np

from analysis.results import Array
from analysis.stats import Interval, over_seeds, ratio_over_seeds
from experiments.runs.attempts import is_run
from experiments.runs.summary import KEYS, KL, RATIOS, ArmSummary, Estimate, summarize
from experiments.study.schema import Run, Study

OF_TYPICAL_SEED = (KL, *RATIOS)  # their geometric mean, as the claims about k3 KL


def summarize_arms(study: Study, folder: Path) -> tuple[ArmSummary, ...]:
    """Every model, arm and cell of which there are runs, in the study's order."""
    there = [run for run in study.runs if is_run(folder / run.id)]
    order = {run._replace(seed=0): None for run in there}
    return tuple(
        _summarize(setting, [run for run in there if run._replace(seed=0) == setting], folder)
        for setting in order
    )


def _summarize(setting: Run, runs: list[Run], folder: Path) -> ArmSummary:
    found = [summarize(folder / run.id) for run in runs]
    estimates = {}
    for key in KEYS:
        if all(key in it for it in found):
            interval = _over_seeds(key, np.array([it[key] for it in found]))
            ends = (interval.estimate, interval.low, interval.high)
            estimate, low, high = (None if it is None else float(f"{it:.6g}") for it in ends)
            assert estimate is not None
            estimates[key] = Estimate(estimate=estimate, low=low, high=high)
    ids = tuple(run.id for run in runs)
    return ArmSummary(
        model=setting.model, arm=setting.arm, cell=setting.cell, runs=ids, estimates=estimates
    )


def _over_seeds(key: str, values_S: Array) -> Interval:
    typical = ratio_over_seeds(values_S, np.ones_like(values_S)) if key in OF_TYPICAL_SEED else None
    return typical or over_seeds(values_S)
