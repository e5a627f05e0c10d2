"""`python -m experiments.launch`: one run of a study, from its last checkpoint where it has one.

Every attempt keeps its own log, metrics and manifest; the run's metrics.jsonl and manifest.json
appear when it has finished. MLflow follows live.
"""

import argparse
import math
import shlex
import shutil
import signal
import sys
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from types import FrameType

from experiments.attempts import (
    Attempt,
    Json,
    Row,
    list_attempts,
    merge_rows,
    next_attempt,
    resumable,
    write_json,
    write_jsonl,
)
from experiments.cli import run_cli
from experiments.local_trainer import train
from experiments.manifest import new_manifest, training_digests
from experiments.schema import Run, Study, load_study, require_executable
from experiments.tee import tee_output
from experiments.tracking import TrackedRun

STEPS_OF_PACE = 5  # the time left is told from the pace of the last steps
KILLED = "ended without a word: killed, or the machine stopped"


class RunLog:
    """Takes each step's metrics to the attempt's file, to MLflow and to the terminal."""

    def __init__(self, name: str, total_steps: int, attempt: Attempt, tracked: TrackedRun) -> None:
        self.name, self.total_steps = name, total_steps
        self.attempt, self.tracked = attempt, tracked
        self.step_times_s: deque[float] = deque(maxlen=STEPS_OF_PACE)

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Records one step; what is not finite counts as undefined."""
        row: Row = {"step": step}
        row |= {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self.attempt.append(row)
        self.tracked.log_rows([row], [int(time.time() * 1000)])
        self.step_times_s.append(metrics["timing_s/step"])
        print(self.progress_line(step, metrics), flush=True)

    def progress_line(self, step: int, metrics: dict[str, float]) -> str:
        """Step, mismatch, reward, speed and time left of a run, in one line."""
        mean_step_s = sum(self.step_times_s) / len(self.step_times_s)
        left = timedelta(seconds=round(mean_step_s * (self.total_steps - step)))
        return (
            f"{self.name:<28} step {step:>3}/{self.total_steps}  "
            f"k3 KL {metrics['rollout_corr/k3_kl']:.2e}  "
            f"reward {metrics['critic/score/mean']:+.3f}  "
            f"{metrics['perf/throughput']:,.0f} tokens/s  {left} left"
        )


def run_attempt(
    study: Study, run: Run, results: Path, manifest: Json, series: list[Attempt]
) -> None:
    """Goes through one attempt, the last of `series`; its manifest says truly how it ended."""
    attempt, run_dir = series[-1], results / run.id
    started = time.monotonic()
    attempt.write_manifest(manifest)
    tracked = TrackedRun(study.study, run.id)
    tracked.start(manifest, goes_on=len(series) > 1)
    log = RunLog(run.id, study.rl.steps, attempt, tracked)
    try:
        base_dir, checkpoints = results / "base" / run.model, run_dir / "checkpoints"
        learnt = train(study, run, base_dir, checkpoints, log.on_step)
        manifest["memory"] |= learnt["measured"]
        manifest |= {"ledger": learnt["ledger"], "status": "finished"}
    except BaseException as error:
        manifest |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        raise
    finally:
        manifest["wall_s"] = round(time.monotonic() - started, 1)
        attempt.write_manifest(manifest)
        tracked.finish(manifest)
    write_jsonl(run_dir / "metrics.jsonl", merge_rows(series))
    write_json(run_dir / "manifest.json", manifest)


def open_series(run_dir: Path, digests: Json) -> list[Attempt]:
    """The attempts to go on from, and a new one; drops checkpoints of any other experiment."""
    former = list_attempts(run_dir)
    for attempt in former:
        manifest = attempt.manifest
        if manifest["status"] == "running":  # it cannot be: this process has the run now
            attempt.write_manifest(manifest | {"status": "failed", "reason": KILLED})
    series = resumable(former, digests)
    if not series:
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    return [*series, next_attempt(run_dir)]


def _stop(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(signal_number).name)


def main() -> None:
    """Parses the command line and launches one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", type=Path, required=True, help="study file")
    parser.add_argument("--run", required=True, help="run id")
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder")
    parser.add_argument("--log", type=Path, required=True, help="copy of the last attempt's log")
    args = parser.parse_args()
    study = load_study(args.study)
    run = study.find_run(args.run)
    require_executable(study, args.study)
    base_dir = args.results / "base" / run.model
    digests = training_digests(study, run, base_dir)
    series = open_series(args.results / run.id, digests)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    with tee_output(series[-1].folder / "train.log", args.log):
        command = shlex.join(sys.orig_argv)
        manifest = new_manifest(study, run, base_dir, series[-1], digests, command)
        if len(series) > 1:
            manifest["started_at"] = series[0].manifest["started_at"]
            print(f"{run.id} goes on from attempt {series[-2].number}", flush=True)
        run_cli(lambda: run_attempt(study, run, args.results, manifest, series))


if __name__ == "__main__":
    run_cli(main)
