"""verl runs side by side: mismatch, weight memory and where the time of a step goes.

    python -m experiments.benchmarks verl_steps RECORD.json RESULTS

RESULTS are folders of runs of `experiments.launch.run`; one without a second step is left out.
Medians over steps, because a few rerouted tokens of an MoE carry the mean of its KL; the first step
is left out, in which everything is loaded, and of every step the saving of checkpoints.
"""

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.benchmarks import records
from experiments.benchmarks.records import ENGINE_PACKAGES, Column, complete, flat, shape_of
from experiments.rl.metric_names import K3_KL, MISMATCH_COUNT, STEP_TIME
from experiments.runs.attempts import read_history
from experiments.runs.manifest import RunManifest
from experiments.runs.metrics import Row, token_mean
from experiments.support.json_files import write_json
from experiments.verl.peak_memory import GPU_MEMORY, HOST_MEMORY

TIMES = {
    "rollout_s": "timing_s/gen",
    "log_prob_s": "timing_s/old_log_prob",
    "training_s": "timing_s/update_actor",
    "weight_sync_s": "timing_s/update_weights",
}
COLUMNS = TIMES | {
    "k3_kl": K3_KL,
    "kl": "rollout_corr/kl",
    "tokens_per_step": "perf/total_num_tokens",
}
MEMORY = {
    "actor_peak_gib": "perf/max_memory_allocated_gb",
    "gpu_peak_gib": GPU_MEMORY,
    "host_peak_gib": HOST_MEMORY,
}
IN_PLACE = "QAT_CORE_IN_PLACE_SYNC"
KERNELS = {"QAT_CORE_LINEAR_KERNEL": "linear layers", "QAT_CORE_EXPERTS_KERNEL": "experts"}
SHOWN = {
    "model": Column(heading="Model"),
    "setting": Column(heading="Arm"),
    "gpus": Column(heading="GPUs", format="g"),
    "progress": Column(heading="Steps"),
    "weights_gib": Column(heading="Weights in vLLM, tensors, GiB", format=".3g"),
    "memory.reported_gib": Column(heading="vLLM's report, GiB", format=".3g"),
    "mean_k3_kl": Column(heading="k3 KL, mean", format=".2e"),
    "mean_of_bf16": Column(heading="mean / BF16's", format=".3g"),
    "k3_kl": Column(heading="k3 KL, median step", format=".2e"),
    "median_of_bf16": Column(heading="median / BF16's", format=".3g"),
    "mismatch_count": Column(heading="Log-probs with other bits", format="g"),
    "commit": Column(heading="Commit"),
    "rollout_s": Column(heading="Rollout, s", format=".1f"),
    "log_prob_s": Column(heading="Log-probs, s", format=".1f"),
    "training_s": Column(heading="Training, s", format=".1f"),
    "weight_sync_s": Column(heading="Weight sync, s", format=".1f"),
    "step_s": Column(heading="Step, s", format=".1f"),
    "memory.actor_peak_gib": Column(heading="Actor on its GPU, GiB", format=".1f"),
    "memory.gpu_peak_gib": Column(heading="Actor and vLLM on a GPU, GiB", format=".1f"),
    "memory.host_peak_gib": Column(heading="Host, GiB", format=".1f"),
    "outside_steps_s": Column(heading="Start and end, s", format=".0f"),
}
NOTE = (
    "One run an arm. Ratios are to BF16's run of the same code on as many GPUs. Mean: over all "
    "tokens of all steps, the estimator of the claims. Medians: over all steps but the first, in "
    "brackets least and most. Random weights: mismatch, memory and times mean something, rewards "
    "do not. Tensors: what vLLM's weights take; its report has caches, workspaces and gaps, too. "
    f"Reload: packed weights through vLLM's, now with `{IN_PLACE}=0`; else in place. Linear layers "
    f"by, experts by: the value of {' or '.join(f'`{name}`' for name in KERNELS)}; else Marlin. "
    "-r3: with routing replay. Log-probs with other bits: in all steps of exact arms, which count "
    "them. Memory: largest over all steps; of GPU and host looked at every 2 s from outside. Start "
    "and end: of the whole run, what is in no step."
)
Figures = dict[str, Any]


def summarize(manifest: RunManifest, rows: list[Row]) -> Figures:
    """What a run tells, of its history."""
    config = manifest.config
    return {
        "model": manifest.model,
        "arm": manifest.arm,
        "gpus": config["gpus"],
        "status": manifest.status,
        "steps": len(rows),
        "planned_steps": config["rl"]["steps"],
        "responses_per_step": config["rl"]["prompts_per_step"]
        * config["rl"]["responses_per_prompt"],
        **{name: _spread_of(manifest.run, rows, key) for name, key in COLUMNS.items()},
        "mean_k3_kl": token_mean(rows, K3_KL),
        "mismatch_count": _count(rows),
        "step_s": spread(map(_step_s, rows[1:])),
        "outside_steps_s": _outside_steps_s(manifest, rows),
        "memory": manifest.memory.model_dump() | _memory(rows),
        "git": manifest.git and manifest.git.model_dump(),
        "environment": manifest.environment,
    }


def shown(run: Figures, runs: Sequence[Figures]) -> records.Row:
    """The row of a run among those of its record."""
    commit = (run["git"] or {}).get("commit")
    identity = ("gpus", "model", "git")
    alike = [it for it in runs if all(it[key] == run[key] for key in identity)]
    floor = next((it for it in alike if it["arm"] == "bf16"), None)
    early = run["steps"] != run["planned_steps"]
    memory = run["memory"]
    return complete(
        SHOWN,
        {
            "setting": _setting(run["arm"], run["environment"]),
            "progress": f"{run['steps']} of {run['planned_steps']}" if early else str(run["steps"]),
            "weights_gib": memory.get("measured_packed_gib") or memory.get("measured_bf16_gib"),
            "mean_of_bf16": run["mean_k3_kl"] / floor["mean_k3_kl"] if floor else None,
            "median_of_bf16": run["k3_kl"][1] / floor["k3_kl"][1] if floor else None,
            "commit": commit[:7] if commit else "not recorded",
            **flat(run),
        },
    )


def _setting(arm: str, environment: Mapping[str, str]) -> str:
    """The arm, by what its packed weights are multiplied, and if they went through the reload."""
    if arm == "bf16":
        return arm
    kernels = {what: environment.get(variable) for variable, what in KERNELS.items()}
    named = [f"{what} by {kernel}" for what, kernel in kernels.items() if kernel]
    reload = ["reload"] if environment.get(IN_PLACE) == "0" else []
    return ", ".join([arm, *named, *reload])


def _spread_of(run: str, rows: list[Row], key: str) -> list[float]:
    values = [row.get(key) for row in rows[1:]]
    if not any(value is not None for value in values):
        raise ValueError(f"{run}: {key}: undefined in every step after the first")
    return spread(values)


def _memory(rows: list[Row]) -> dict[str, float]:
    """Largest memory of actor, GPU and host in any step; verl's "gb" are GiB."""
    found = {name: [row[key] for row in rows if row.get(key)] for name, key in MEMORY.items()}
    return {name: max(filter(None, values)) for name, values in found.items() if values}


def _outside_steps_s(manifest: RunManifest, rows: list[Row]) -> float | None:
    """Start and end of a run; None while it runs, or where it took several attempts."""
    if manifest.wall_s is None or manifest.attempt > 1:
        return None
    return manifest.wall_s - sum(float(row[STEP_TIME] or 0.0) for row in rows)


def _count(rows: list[Row]) -> float | None:
    """Log-probs with other bits in all steps; None of an arm that does not count them."""
    counts = [row.get(MISMATCH_COUNT) for row in rows]
    return None if None in counts else sum(filter(None, counts))


def _step_s(row: Row) -> float:
    return float(row[STEP_TIME] or 0.0) - float(row.get("timing_s/save_checkpoint") or 0.0)


def spread(found: Iterable[float | None]) -> list[float]:
    """Least, median and most of what is known."""
    values = [value for value in found if value is not None]
    return [min(values), statistics.median(values), max(values)]


def _setup(manifest: RunManifest) -> Figures:
    """Versions and kinds of hardware, for whatever number of GPUs."""
    hardware = manifest.hardware
    kinds = {"cpu": hardware.cpu, "gpus": sorted(set(hardware.gpus))}
    return {"versions": manifest.versions, "hardware": kinds}


def write_record(path: Path, run_dirs: Iterable[Path]) -> None:
    """Writes the record of runs and prints it."""
    histories = []
    for run_dir in run_dirs:
        manifest, rows = read_history(run_dir)
        if manifest.config.get("trainer") != "verl":
            raise ValueError(
                f"{run_dir}: not a run of verl, its trainer is {manifest.config.get('trainer')}; "
                "name folders of runs with trainer: verl"
            )
        if len(rows) > 1:
            histories.append((manifest, rows))
        else:
            print(f"{run_dir}: left out, {len(rows)} steps")
    if not histories:
        raise ValueError(f"{path}: no run has a second step, nothing to record")
    runs = sorted(starmap(summarize, histories), key=itemgetter("model", "gpus", "arm"))
    setup = _setup(histories[0][0])
    if any(_setup(manifest) != setup for manifest, _ in histories):
        raise ValueError("RESULTS: runs of different machines or versions; summarize them apart")
    shape = shape_of({}, SHOWN, NOTE, ("verl", *ENGINE_PACKAGES))
    record = {"benchmark": "verl", **setup, **shape, "rows": [shown(it, runs) for it in runs]}
    write_json(path, record)
    Console().print_json(data=record["rows"])


def main(arguments: argparse.Namespace) -> None:
    """Writes the record of all runs."""
    found = [folder.glob("*_seed*/attempts") for folder in arguments.results]
    write_record(arguments.record, [path.parent for paths in found for path in paths])
