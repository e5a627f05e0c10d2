"""verl runs side by side: mismatch, weight memory and where the time of a step goes.

    python -m experiments.benchmarks.verl_steps RECORD.json RESULTS

RESULTS are folders of runs that `experiments.launch` has finished. Means leave out the first step,
in which everything is loaded, compiled and allocated.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.attempts import Row, read_history
from experiments.cli import run_cli

TIMES = {
    "rollout_s": "timing_s/gen",
    "log_prob_s": "timing_s/old_log_prob",
    "training_s": "timing_s/update_actor",
    "weight_sync_s": "timing_s/update_weights",
    "step_s": "timing_s/step",
}
MISMATCH = {"k3_kl": "rollout_corr/k3_kl", "kl": "rollout_corr/kl"}


def summarize(run_dir: Path) -> dict[str, Any]:
    """What a finished run tells.

    Raises:
        ValueError: the run has not finished, or has no step beyond the first.
    """
    manifest, rows = read_history(run_dir)
    if manifest["status"] != "finished" or len(rows) < 2:
        raise ValueError(f"{run_dir}: not finished, or a single step; run it again")
    config = manifest["config"]
    return {
        "model": manifest["model"],
        "arm": manifest["arm"],
        "gpus": config["gpus"],
        "steps": len(rows),
        "responses_per_step": config["rl"]["prompts_per_step"]
        * config["rl"]["responses_per_prompt"],
        **{name: _spread(rows, key) for name, key in (MISMATCH | TIMES).items()},
        "tokens_per_step": _spread(rows, "perf/total_num_tokens"),
        "memory": manifest["memory"],
        "git": manifest["git"],
        "versions": manifest["versions"],
        "hardware": manifest["hardware"],
    }


def _spread(rows: list[Row], key: str) -> dict[str, float]:
    values = [float(row[key] or 0.0) for row in rows[1:]]
    return {"mean": statistics.mean(values), "low": min(values), "high": max(values)}


def print_table(runs: list[dict[str, Any]]) -> None:
    """Means, a row a run."""
    columns = ("k3_kl", *TIMES)
    table = Table("model", "arm", "GPUs", *columns)
    for run in runs:
        cells = [f"{run[name]['mean']:.3g}" for name in columns]
        table.add_row(run["model"], run["arm"], str(run["gpus"]), *cells)
    Console().print(table)


def main() -> None:
    """Writes the record and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("results", type=Path, nargs="+", help="folders of runs")
    arguments = parser.parse_args()
    run_dirs = sorted(p.parent for r in arguments.results for p in r.glob("*_seed*/manifest.json"))
    runs = [summarize(run_dir) for run_dir in run_dirs]
    arguments.record.write_text(json.dumps({"benchmark": "verl", "runs": runs}, indent=1) + "\n")
    print_table(runs)


if __name__ == "__main__":
    run_cli(main)
