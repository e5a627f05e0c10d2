"""MLflow at a glance: short names, few columns, and a saved view with a row an arm and its charts.

The view is an experiment tag in the form of MLflow's own "share" button (MLflow 3.17); its address
also opens the experiment in model-training mode. Ordered by date MLflow nests seeds beneath arms.
"""

import json
from collections.abc import Mapping

from mlflow import MlflowClient

from experiments.rl.metric_names import K3_KL, REWARD
from experiments.runs.summary import ACCURACIES, KL, KL_RATIO, MIB, REWARD_MEAN, SHARE

VIEW = "glance"
SHARED_VIEW = f"mlflow.sharedViewState.{VIEW}"
NOTE, COLOR, PARENT = "mlflow.note.content", "mlflow.runColor", "mlflow.parentRunId"
# MLflow sorts columns by name. All fit a fresh browser of 1280 pixels, in which headings have some
# 14 characters, as the date is narrowed to its icon and the duration comes last.
COLUMNS: Mapping[str, str] = {
    KL: "1. k3 KL nats",
    ACCURACIES["nvfp4"]: "2. acc NVFP4",
    ACCURACIES["bf16"]: "3. acc BF16",
    KL_RATIO: "4. KL x BF16",
    REWARD_MEAN: "5. reward",
    MIB: "7. MiB",
    SHARE: "8. MiB x BF16",
}
COLLAPSED = "6. collapsed"  # how many runs; of a run 1, at the step of its collapse
WIDTHS = {"attributes.`Run Name`": 160, "runDateAndNestInfo": 40}  # pixels; the date's as an icon
METRIC_WIDTH = 92
CHARTS = {K3_KL: "log", REWARD: "linear", "actor/entropy": "linear"}
COLORS = {  # as in the figures
    "bf16": "#8a8a8a",
    "nvfp4-noqat": "#d55e00",
    "nvfp4-qat": "#0072b2",
    "nvfp4-qat-ffn": "#009e73",
    "bf16-exact": "#3c3c3c",
    "nvfp4-qat-exact": "#56b4e9",
}
# of an arm's further cells, in turn: MLflow's own choice is often the blue of QAT
CELL_COLORS = ("#cc79a7", "#e69f00", "#7f5539", "#6a3d9a", "#b2df8a")
DIGITS = 3


def short_name(model: str, arm: str, cell: str | None, seed: int | None = None) -> str:
    """Name that fits a column: "dense qat" of nano-dense's arm nvfp4-qat, "dense qat s0" of seed 0.

    MLflow cuts it after some 20 characters: a run of a cell is "qat s0 lr2e-4 small-dense".
    """
    model, arm = model.removeprefix("nano-"), arm.removeprefix("nvfp4-")
    run = arm if seed is None else f"{arm} s{seed}"
    return f"{run} {cell} {model}" if cell else f"{model} {run}"


def columns(values: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a run or an arm, by key of `summary.KEYS`, as MLflow's metrics, rounded."""
    return {name: float(f"{values[k]:.{DIGITS}g}") for k, name in COLUMNS.items() if k in values}


def save_view(client: MlflowClient, experiment_id: str) -> None:
    """Saves the view in an experiment."""
    section = {"uuid": "arms", "name": "Arms, mean over seeds", "display": True}
    shared = {"type": "LINE", "metricSectionId": "arms", "runsCountToCompare": 10, "range": {}}
    shared |= {"xAxisKey": "step", "xAxisScaleType": "linear", "lineSmoothness": 0}
    metrics = [f"metrics.`{it}`" for it in sorted([*COLUMNS.values(), COLLAPSED])]
    widths = WIDTHS | dict.fromkeys(metrics, METRIC_WIDTH)
    state = {
        "orderByKey": "attributes.start_time",
        "orderByAsc": True,
        "selectedColumns": metrics,
        "columnOrder": list(widths),
        "columnWidths": widths,
        "runsHiddenMode": "SHOW_ALL",
        "compareRunSections": [section],
        "compareRunCharts": [
            {**shared, "uuid": key, "metricKey": key, "selectedMetricKeys": [key], "scaleType": it}
            for key, it in CHARTS.items()
        ],
    }
    client.set_experiment_tag(experiment_id, SHARED_VIEW, json.dumps(state))
    client.set_experiment_tag(experiment_id, "mlflow.experimentKind", "custom_model_development")


def view_address(root: str, experiment_id: str) -> str:
    """Where a browser finds the view."""
    query = f"viewStateShareKey={VIEW}&workflowType=machine_learning"
    return f"{root}/#/experiments/{experiment_id}/runs?{query}"
