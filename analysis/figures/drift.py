"""Figure: which layers and kinds of weights drift first, by arm."""

from matplotlib.figure import Figure

from analysis.drift import order
from analysis.results import Results
from analysis.style import arm_style
from experiments.study.arms import ARMS
from experiments.study.schema import Study

CAPTION = order.CAPTION


def runs_by_arm(study: Study, results: Results, model: str) -> order.Runs:
    """The drift of a model's runs, of the arms whose rollouts are in NVFP4."""
    arms = [arm for arm in study.arms if ARMS[arm].rollout_recipe]
    return {arm_style(arm).label: results.drift_of(model, arm) for arm in arms}


def draw(study: Study, results: Results) -> Figure:
    """Two rows a model, layers and kinds; a column an arm."""
    return order.draw({model: runs_by_arm(study, results, model) for model in study.models})
