"""Figure: which layers and kinds of weights drift first, by arm."""

from matplotlib.figure import Figure

from analysis.collapse.data import GridData
from analysis.collapse.grid import NOQAT, QAT, show_rate
from analysis.drift import order
from analysis.results import Results
from analysis.style import arm_style
from experiments.runs.drift import read_drift
from experiments.study.arms import ARMS
from experiments.study.schema import Study


def runs_by_arm(study: Study, results: Results, model: str) -> order.Runs:
    """The drift of a model's runs, of the arms whose rollouts are in NVFP4."""
    arms = [arm for arm in study.arms if ARMS[arm].rollout_recipe]
    return {arm_style(arm).label: results.drift_of(model, arm) for arm in arms}


def draw(study: Study, results: Results) -> Figure:
    """Two rows a model, layers and kinds; a column an arm."""
    return order.draw({model: runs_by_arm(study, results, model) for model in study.models})


def runs_of_grid(data: GridData) -> order.Runs:
    """The drift without QAT and with it, dense model, at the highest rate."""
    settings = [data.design.plain(arm, data.lrs[-1]) for arm in (NOQAT, QAT)]
    complete = [setting for setting in settings if setting in data.runs]
    if not complete:
        rate = show_rate(data.lrs[-1])
        raise ValueError(
            f"{data.results}: no arm of {data.design.dense} at {rate} has all its runs; run the "
            "study"
        )
    return {
        arm_style(setting.arm).label: [
            read_drift(data.results / run.id) for run in data.runs[setting]
        ]
        for setting in complete
    }


def draw_of_grid(data: GridData) -> Figure:
    """When the NVFP4 codes of each layer and kind of weight have moved, by arm, at one rate."""
    rate = show_rate(data.lrs[-1])
    return order.draw({f"{data.design.dense}, learning rate {rate}": runs_of_grid(data)})
