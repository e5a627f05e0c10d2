"""`python -m experiments.launch.run`: one run of a study, from its last checkpoint if any.

Every attempt keeps its own log, metrics and manifest; the run's metrics.jsonl and manifest.json
appear when it has finished. MLflow follows live. A run that has finished is not trained again:
Snakemake, which ended before it saw that, removed those two files, and they are only written anew.
"""

import argparse
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from experiments.launch.digests import training_digests
from experiments.launch.preflight import require_devices, require_executable
from experiments.launch.run_log import RunLog
from experiments.runs.attempts import (
    Attempt,
    OnStep,
    is_finished,
    list_attempts,
    next_attempt,
    resumable,
    write_results,
)
from experiments.runs.manifest import new_manifest
from experiments.study.load import load_study
from experiments.study.schema import Run, Study
from experiments.support.cli import RESULTS, RUN, STUDY, run_cli
from experiments.support.gpu_locks import reserved_devices
from experiments.support.json_files import Json
from experiments.support.tee import tee_output
from experiments.tracking.publish import TrackedRun

KILLED = "ended without a word: killed, or the machine stopped"


def run_attempt(
    study: Study, run: Run, results: Path, manifest: Json, series: list[Attempt]
) -> None:
    """Goes through one attempt, the last of `series`; its manifest says truly how it ended."""
    attempt = series[-1]
    started = time.monotonic()
    attempt.write_manifest(manifest)
    tracked = TrackedRun(study.study, run.id)
    tracked.start(manifest, goes_on=len(series) > 1)
    log = RunLog(run.id, study.rl.steps, attempt, tracked)
    try:
        learnt = _train(study, run, results, series, log.on_step)
        manifest["memory"] |= learnt.pop("measured")
        manifest |= learnt | {"status": "finished"}
    except BaseException as error:
        manifest |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        raise
    finally:
        manifest["wall_s"] = round(time.monotonic() - started, 1)
        attempt.write_manifest(manifest)
        tracked.finish(manifest)
    write_results(results / run.id)


def _train(study: Study, run: Run, results: Path, series: list[Attempt], on_step: OnStep) -> Json:
    # here, because the local one imports torch, which has no place beside verl
    if study.trainer == "verl":
        from experiments.verl.trainer import train
    else:
        from experiments.launch.local_trainer import train
    return train(study, run, results, series, on_step)


@contextmanager
def sole_launcher(run_dir: Path) -> Iterator[None]:
    """Keeps other processes from the run for the block; the kernel lets go of a killed one's lock.

    Raises:
        ValueError: another process has the run.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(run_dir / "lock").acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{run_dir}: another process trains it; wait for it or end it") from None
    with lock:
        yield


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


def launch(study: Study, run: Run, results: Path, digests: Json, log: Path) -> None:
    """Makes an attempt at a run, on GPUs of its own; `log` gets a copy of the attempt's log."""
    series = open_series(results / run.id, digests)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    devices = reserved_devices(study.device, study.gpus)
    with tee_output(series[-1].folder / "train.log", log), devices:
        command = shlex.join(sys.orig_argv)
        base_dir = results / "base" / run.model
        manifest = new_manifest(study, run, base_dir, series[-1], digests, command)
        if len(series) > 1:
            manifest["started_at"] = series[0].manifest["started_at"]
            print(f"{run.id} goes on from attempt {series[-2].number}", flush=True)
        run_cli(lambda: run_attempt(study, run, results, manifest, series))


def main() -> None:
    """Parses the command line and launches one run, unless it has finished already."""
    parser = argparse.ArgumentParser(description=__doc__, parents=[STUDY, RUN, RESULTS])
    parser.add_argument("--log", type=Path, required=True, help="copy of the last attempt's log")
    args = parser.parse_args()
    study = load_study(args.study)
    run = study.find_run(args.run)
    require_executable(study, [run])
    require_devices(study, args.study)
    digests = training_digests(study, run, args.results)
    run_dir = args.results / run.id
    with sole_launcher(run_dir):
        if is_finished(list_attempts(run_dir), digests):
            write_results(run_dir)
            print(
                f"{run.id} has finished; its results are written again, delete {run_dir} to retrain"
            )
        else:
            launch(study, run, args.results, digests, args.log)


if __name__ == "__main__":
    run_cli(main)
