"""verl runs side by side: mismatch, weight memory and where the time of a step goes.

    python -m experiments.benchmarks.verl_steps RECORD.json RESULTS

RESULTS are folders of runs of `experiments.launch.run`. A run that ended early counts with the
steps that it has, and one without a second step is left out. Medians over steps, because a few
rerouted tokens of an MoE carry the mean of its KL; the first step is left out, in which everything
is loaded, compiled and allocated, and of every step the saving of checkpoints.
"""

import argparse
import statistics
from collections.abc import Iterable
from itertools import starmap
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.rl.metric_names import K3_KL, STEP_TIME
from experiments.runs.attempts import read_history
from experiments.runs.manifest import RunManifest
from experiments.runs.metrics import Row, token_mean
from experiments.support.cli import run_cli
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


def summarize(manifest: RunManifest, rows: list[Row]) -> dict[str, Any]:
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
        "step_s": spread(map(_step_s, rows[1:])),
        "outside_steps_s": _outside_steps_s(manifest, rows),
        "memory": manifest.memory.model_dump() | _memory(rows),
        "git": manifest.git and manifest.git.model_dump(),
        "environment": manifest.environment,
    }


def _spread_of(run: str, rows: list[Row], key: str) -> dict[str, float]:
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


def _step_s(row: Row) -> float:
    return float(row[STEP_TIME] or 0.0) - float(row.get("timing_s/save_checkpoint") or 0.0)


def spread(found: Iterable[float | None]) -> dict[str, float]:
    """Median, least and most of what is known."""
    values = [value for value in found if value is not None]
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _common_setup(manifests: list[RunManifest]) -> dict[str, Any]:
    """Versions and kinds of hardware; ValueError where they differ, for whatever number of GPUs."""
    setups = [_setup(manifest) for manifest in manifests]
    if any(setup != setups[0] for setup in setups):
        raise ValueError("RESULTS: runs of different machines or versions; summarize them apart")
    return setups[0]


def _setup(manifest: RunManifest) -> dict[str, Any]:
    hardware = manifest.hardware
    kinds = {"cpu": hardware.cpu, "gpus": sorted(set(hardware.gpus))}
    return {"versions": manifest.versions, "hardware": kinds}


def write_record(path: Path, run_dirs: Iterable[Path]) -> None:
    """Writes the record of runs and prints it.

    Raises:
        ValueError: no run has a step beyond the first, or they are of different machines, or one is
            not of verl.
    """
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
    setup = _common_setup([manifest for manifest, _ in histories])
    write_json(path, {"benchmark": "verl", **setup, "runs": runs})
    _print_table(runs)


def _print_table(runs: list[dict[str, Any]]) -> None:
    """Medians, a row a run."""
    columns = ("k3_kl", *TIMES, "step_s")
    table = Table("model", "arm", "GPUs", *columns)
    for run in runs:
        cells = [f"{run[name]['median']:.3g}" for name in columns]
        table.add_row(run["model"], run["arm"], str(run["gpus"]), *cells)
    Console().print(table)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("results", type=Path, nargs="+", help="folders of runs")
    arguments = parser.parse_args()
    found = [folder.glob("*_seed*/attempts") for folder in arguments.results]
    write_record(arguments.record, [path.parent for paths in found for path in paths])


if __name__ == "__main__":
    run_cli(main)
