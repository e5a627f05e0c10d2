"""What a run comes to in a few numbers, and an arm by its runs.

`KEYS` says of each number what it is, as pages show it. Accuracies are of the last checkpoint and
sampled answers; a ratio is to the BF16 run of the same model, cell and seed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from experiments.rl.metric_names import K3_KL, RESPONSE_TOKENS, REWARD
from experiments.runs.attempts import is_run, read_history
from experiments.runs.evaluation import EVALUATIONS, read_evaluations
from experiments.runs.manifest import RunManifest
from experiments.runs.metrics import Row, token_mean
from experiments.runs.record import has_file
from experiments.study.schema import Run
from experiments.support.json_files import REMAKE
from qat_core.units import MIB_PER_GIB

KL, KL_RATIO, REWARD_MEAN = "k3_kl", "k3_kl_ratio", "reward"
ACCURACIES = {"bf16": "accuracy_bf16", "nvfp4": "accuracy_nvfp4"}
MIB, SHARE = "weights_mib", "weights_share"
KEYS = {
    KL: "mean k3 KL over all sampled tokens, nats a token",
    KL_RATIO: "k3 KL over BF16's",
    REWARD_MEAN: "mean reward over all steps",
    ACCURACIES["nvfp4"]: "right answers, served in NVFP4",
    ACCURACIES["bf16"]: "right answers, served in BF16",
    MIB: "weights of the rollout engine, MiB",
    SHARE: "weights over BF16's",
}
RATIOS = {KL_RATIO: KL, SHARE: MIB}
OF_ROWS = (K3_KL, REWARD, RESPONSE_TOKENS)


class Estimate(BaseModel):
    """A mean over seeds and its interval, which a single seed has not."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    estimate: float
    low: float | None = None
    high: float | None = None


class ArmSummary(BaseModel):
    """A model's runs with one arm, in one cell of the study, if it has cells."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    arm: str
    cell: str | None
    runs: tuple[str, ...]  # their ids
    estimates: Mapping[str, Estimate]  # by key of `KEYS`, of those that all of them have


def summarize(run_dir: Path) -> dict[str, float]:
    """The numbers of a run that has finished, by key of `KEYS`; what is not known is left out."""
    manifest, rows = read_history(run_dir, OF_ROWS)
    if manifest.status != "finished":
        return {}
    found = _measured(manifest, rows) | _accuracies(run_dir)
    bf16_dir = run_dir.with_name(Run(manifest.model, "bf16", manifest.seed, manifest.cell).id)
    if is_run(bf16_dir):
        bf16_manifest, bf16_rows = read_history(bf16_dir, OF_ROWS)
        bf16 = _measured(bf16_manifest, bf16_rows) if bf16_manifest.status == "finished" else {}
        for ratio, key in RATIOS.items():
            if found.get(key) and bf16.get(key):
                found[ratio] = found[key] / bf16[key]
    return {key: found[key] for key in KEYS if key in found}


def _measured(manifest: RunManifest, rows: Sequence[Row]) -> dict[str, float]:
    found = {MIB: manifest.memory.measured_gib * MIB_PER_GIB}
    mean = token_mean(rows, K3_KL)
    if mean is not None:
        found[KL] = mean
    rewards = [value for row in rows if (value := row.get(REWARD)) is not None]
    if rewards and len(rewards) == len(rows):
        found[REWARD_MEAN] = fmean(rewards)
    return found


def _accuracies(run_dir: Path) -> dict[str, float]:
    if not has_file(run_dir, EVALUATIONS):
        return {}
    evaluations = read_evaluations(run_dir, REMAKE)
    last = max(it.step for it in evaluations)
    sampled = [it for it in evaluations if (it.step, it.decoding) == (last, "sampled")]
    return {ACCURACIES[it.precision]: it.accuracy for it in sampled}
