"""MLflow at a glance: short names, a few summary metrics, and a saved view that shows them first.

The view is an experiment tag in the form of MLflow's own "share" button (MLflow 3.17); its address
also opens the experiment in model-training mode.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from mlflow import MlflowClient

from experiments.rl.metric_names import K3_KL, REWARD
from experiments.runs.attempts import is_run, read_history
from experiments.runs.evaluation import Evaluation
from experiments.runs.manifest import RunManifest
from experiments.runs.metrics import Row, token_mean
from experiments.study.schema import Run
from qat_core.units import MIB_PER_GIB

VIEW = "glance"
SHARED_VIEW = f"mlflow.sharedViewState.{VIEW}"
SUMMARY = "summary/"
# short, because MLflow cuts headings after some 12 characters and sorts them by name
ACCURACIES = {"bf16": "acc", "nvfp4": "acc4"}  # after the last step, of sampled answers
KL, KL_RATIO = "kl", "kl_x"  # mean k3 KL over all tokens, in 1e-6 nats; over BF16's
MIB, SHARE = "mib", "share"  # weights that the engine got; over BF16's
MEAN_REWARD = "reward"  # over all steps, which is what studies of collapse compare
COLLAPSE = "collapse"  # its step, of the runs that the study's claims call collapsed
COLUMNS = (*ACCURACIES.values(), MEAN_REWARD, COLLAPSE, KL, KL_RATIO, MIB, SHARE)
DIGITS = 4


def short_name(manifest: RunManifest) -> str:
    """Name that fits a column: "dense qat s0" of nano-dense_nvfp4-qat_seed0.

    MLflow cuts it after some 20 characters: a run of a cell is "qat s0 lr2e-4 small-dense".
    """
    model, arm = manifest.model.removeprefix("nano-"), manifest.arm.removeprefix("nvfp4-")
    run = f"{arm} s{manifest.seed}"
    return f"{run} {manifest.cell} {model}" if manifest.cell else f"{model} {run}"


def summarize(
    run_dir: Path, manifest: RunManifest, rows: Sequence[Row], evaluations: Sequence[Evaluation]
) -> dict[str, float]:
    """Summary metrics of a run that has finished, rounded; what is not known is left out.

    Ratios are to the BF16 run of the same model, cell and seed, where it lies next to this one.
    """
    if manifest.status != "finished":
        return {}
    found = _measured(manifest, rows) | _accuracies(evaluations)
    bf16_dir = run_dir.with_name(Run(manifest.model, "bf16", manifest.seed, manifest.cell).id)
    if is_run(bf16_dir):
        bf16_manifest, bf16_rows = read_history(bf16_dir)
        if bf16_manifest.status == "finished":
            bf16 = _measured(bf16_manifest, bf16_rows)
            for name, over in ((KL, KL_RATIO), (MIB, SHARE)):
                if found.get(name) and bf16.get(name):
                    found[over] = found[name] / bf16[name]
    return {f"{SUMMARY}{name}": _rounded(found[name]) for name in COLUMNS if name in found}


def save_view(client: MlflowClient, experiment_id: str) -> None:
    """Saves the view in an experiment: columns of the summary, models and arms together."""
    state = {
        "orderByKey": "tags.`run`",
        "orderByAsc": True,
        "selectedColumns": [f"metrics.`{SUMMARY}{name}`" for name in COLUMNS],
    }
    client.set_experiment_tag(experiment_id, SHARED_VIEW, json.dumps(state))
    client.set_experiment_tag(experiment_id, "mlflow.experimentKind", "custom_model_development")


def view_address(root: str, experiment_id: str) -> str:
    """Where a browser finds the view."""
    query = f"viewStateShareKey={VIEW}&workflowType=machine_learning"
    return f"{root}/#/experiments/{experiment_id}/runs?{query}"


def _measured(manifest: RunManifest, rows: Sequence[Row]) -> dict[str, float]:
    found = {MIB: manifest.memory.measured_gib * MIB_PER_GIB}
    mean = token_mean(rows, K3_KL)
    if mean is not None:
        found[KL] = 1e6 * mean
    rewards = [value for row in rows if (value := row.get(REWARD)) is not None]
    if rewards and len(rewards) == len(rows):
        found[MEAN_REWARD] = fmean(rewards)
    return found


def _accuracies(evaluations: Sequence[Evaluation]) -> dict[str, float]:
    last = max(it.step for it in evaluations)
    sampled = [it for it in evaluations if (it.step, it.decoding) == (last, "sampled")]
    return {ACCURACIES[it.precision]: it.accuracy for it in sampled}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
