"""`python -m experiments.launch.run`: runs of a study, resumed from their last checkpoints if any.

Reads from top to bottom: `main` checks the runs, `launch_unless_finished` locks one, `launch` opens
an attempt with its log and GPUs, `run_attempt` trains and records how the attempt ended. Of several
runs each has a process of its own, forked from this one, which has imported and read what they
share.

Every attempt keeps its own log, metrics and manifest; the run's metrics.jsonl and manifest.json
appear when it has finished. A finished run is not trained again: if only those two files are
missing (Snakemake removes them if it ended before it saw them), they are written again.
"""

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from experiments.launch.digests import training_digests
from experiments.launch.preflight import check_devices, check_settings
from experiments.rl.metric_names import DRIFT_FILE
from experiments.runs.attempts import (
    STOP_FILE,
    Attempt,
    OnStep,
    is_finished,
    list_attempts,
    next_attempt,
    require_whole_history,
    resumable,
    write_results,
)
from experiments.runs.evaluation import EVALUATIONS
from experiments.runs.inputs import check_base, check_data, read_base_manifest, require_prompts_fit
from experiments.runs.manifest import MANIFEST, Digests, RunManifest, TrainingResult, WeightMemory
from experiments.runs.metrics import METRICS
from experiments.runs.provenance import git_state, hardware, switches, versions
from experiments.study.arms import ARMS
from experiments.study.load import load_study
from experiments.study.protocol import judging_digest, protocol_digest
from experiments.study.schema import Run, Study
from experiments.support.cli import RESULTS, RUNS, STUDY, run_cli
from experiments.support.folders import sole_process
from experiments.support.gpu_locks import reserved_devices
from experiments.support.json_files import read_json
from experiments.support.signals import end_with_parent, raise_stop_signals
from experiments.support.subprocess_call import private_temporary_folder
from experiments.support.tee import tee_output
from experiments.tracking.run_log import RunLog, Tracker
from qat_core.planning.predicted_memory import predict_weight_memory_gib
from qat_core.rollout.vllm.switches import require_known_variables

KILLED = "killed without a chance to report: SIGKILL, out of memory, or the machine stopped"


def main() -> None:
    """Parses the command line and launches runs, one after the other, unless they have finished."""
    parser = argparse.ArgumentParser(description=__doc__, parents=[STUDY, RUNS, RESULTS])
    parser.add_argument(
        "--untracked",
        action="store_true",
        help="keep nothing in MLflow, e.g. where it is not installed",
    )
    parser.add_argument(
        "--log", type=Path, nargs="+", required=True, help="of each run, copy of the last log"
    )
    args = parser.parse_args()
    if len(args.log) != len(args.run):
        raise ValueError(f"--log: {len(args.log)} for {len(args.run)} runs; name one for each")
    require_known_variables()
    study = load_study(args.study)
    runs = [study.find_run(name) for name in args.run]
    check_devices(study, args.study)
    check_settings(study, runs)
    of_runs = [training_digests(study, run, args.results) for run in runs]
    trackers = [make_tracker(study, run, args.untracked) for run in runs]
    launches = [
        partial(launch_unless_finished, study, run, args.results, digests, log, tracker)
        for run, digests, log, tracker in zip(runs, of_runs, args.log, trackers, strict=True)
    ]
    if len(runs) == 1:
        launches[0]()
        return
    if study.trainer == "local":
        import experiments.launch.local_trainer  # noqa: F401
    raise_stop_signals()
    if failed := [code for code in map(exit_code_of_fork, launches) if code]:
        sys.exit(failed[0])


def exit_code_of_fork(function: Callable[[], None]) -> int:
    """Of a copy of this process that calls a function; it ends with this one."""
    process = get_context("fork").Process(target=_call, args=(function,))
    process.start()
    try:
        process.join()
    except KeyboardInterrupt:
        process.terminate()
        process.join()
        raise
    assert process.exitcode is not None
    return process.exitcode if process.exitcode >= 0 else 128 - process.exitcode


def _call(function: Callable[[], None]) -> None:
    end_with_parent()
    run_cli(function)


def launch_unless_finished(
    study: Study, run: Run, results: Path, digests: Digests, log: Path, tracker: Tracker
) -> None:
    """Launches a run, in this process, while no other does."""
    run_dir = results / run.id
    with sole_process(run_dir / "lock", run_dir, "trains"):
        if is_finished(list_attempts(run_dir), digests):
            write_results(run_dir)
            print(f"{run.id} has finished; its results are rewritten, delete {run_dir} to retrain")
        else:
            base_dir = results / "base" / study.base_of(run)
            check_base(base_dir)
            require_prompts_fit(read_base_manifest(base_dir).longest_prompt_tokens, study)
            if study.trainer == "verl":
                check_data(results / "data" / study.study)
            launch(study, run, results, digests, log, tracker)


def make_tracker(study: Study, run: Run, untracked: bool) -> Tracker:
    """MLflow, which is imported only where it is used."""
    if untracked:
        return Tracker()
    from experiments.tracking.live import TrackedRun

    return TrackedRun(study.study, run.id)


def launch(
    study: Study, run: Run, results: Path, digests: Digests, log: Path, tracker: Tracker
) -> None:
    """Makes an attempt at a run, on GPUs of its own; `log` gets a copy of the attempt's log."""
    attempts = open_attempts(results / run.id, digests)
    raise_stop_signals()

    def run_on_own_gpus() -> None:
        if len(attempts) > 1:
            print(f"{run.id} resumes from attempt {attempts[-2].number}", flush=True)
        with reserved_devices(study.device, study.gpus, study.gpu_memory_gib):
            run_attempt(study, run, results, digests, attempts, tracker)

    with tee_output(attempts[-1].folder / "train.log", log):
        run_cli(run_on_own_gpus)


def open_attempts(run_dir: Path, digests: Digests) -> list[Attempt]:
    """The attempts to resume, and a new one."""
    previous = list_attempts(run_dir)
    for attempt in previous:
        manifest = attempt.manifest
        if manifest.status == "running":  # not any more: this process has the lock
            manifest.failed(KILLED).write(attempt.folder)
    attempts = resumable(previous, digests)
    require_whole_history(attempts)
    if not attempts:  # of another experiment; one made from now on, while it waits too, counts
        (run_dir / STOP_FILE).unlink(missing_ok=True)
    return [*attempts, next_attempt(run_dir)]


def remove_results(run_dir: Path) -> None:
    """Removes what another experiment left in the folder, but for its attempts."""
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    for name in (METRICS, MANIFEST, EVALUATIONS, DRIFT_FILE):
        (run_dir / name).unlink(missing_ok=True)


def run_attempt(
    study: Study,
    run: Run,
    results: Path,
    digests: Digests,
    attempts: list[Attempt],
    tracker: Tracker,
) -> None:
    """Trains in the last of `attempts`; its manifest says how the attempt ended."""
    attempt, resumes = attempts[-1], len(attempts) > 1
    started = time.monotonic()
    manifest = new_manifest(study, run, results / "base" / study.base_of(run), digests, attempts)
    if not resumes:  # not before: a run that is stopped while it waits for a GPU replaces nothing
        remove_results(results / run.id)
    manifest.write(attempt.folder)
    try:
        tracker.start(manifest, resumes)
        log = RunLog(run.id, study.rl_of(run.cell).steps, attempt, tracker)
        manifest = manifest.finished(train(study, run, results, attempts, log.on_step))
    except BaseException as error:
        manifest = manifest.failed(f"{type(error).__name__}: {error}")
        raise
    finally:
        manifest = manifest.model_copy(update={"wall_s": round(time.monotonic() - started, 1)})
        manifest.write(attempt.folder)
        tracker.finish(manifest)
    write_results(results / run.id)


def new_manifest(
    study: Study, run: Run, base_dir: Path, digests: Digests, attempts: list[Attempt]
) -> RunManifest:
    """The manifest of an attempt that starts now; what training will measure is still None."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    first = attempts[0].manifest if len(attempts) > 1 else None  # whose protocol stays the run's
    config, packed = read_json(base_dir / "config.json"), ARMS[run.arm].rollout_recipe
    multiple = study.vocabulary_multiple
    memory = WeightMemory(
        predicted_bf16_gib=predict_weight_memory_gib(config, "bf16", multiple),
        predicted_packed_gib=packed and predict_weight_memory_gib(config, packed, multiple),
    )
    return RunManifest(
        run=run.id,
        study=study.study,
        model=run.model,
        arm=run.arm,
        seed=run.seed,
        cell=run.cell,
        status="running",
        reason=None,
        started_at=first.started_at if first else now,
        attempt_started_at=now,
        wall_s=None,
        attempt=attempts[-1].number,
        command=shlex.join(sys.orig_argv),
        config=study.training_config(run),
        git=git_state(),
        digests=digests,
        versions=versions(),
        hardware=hardware(study.device),
        environment=switches(),
        protocol_sha256=first.protocol_sha256 if first else protocol_digest(study),
        judging_sha256=first.judging_sha256 if first else judging_digest(study),
        seeds={"run": run.seed, "base": study.bases[study.base_of(run)].seed},
        memory=memory,
        coverage=None,
    )


def train(
    study: Study, run: Run, results: Path, attempts: list[Attempt], on_step: OnStep
) -> TrainingResult:
    """Trains to the last step, in this process or by verl; `on_step` gets each step's metrics."""
    # imported here: torch, which the local trainer imports, must not be loaded next to verl
    if study.trainer == "verl":
        from experiments.verl.trainer import train as train_by_verl

        return train_by_verl(study, run, results, attempts, on_step)
    from experiments.launch.local_trainer import train_here

    with private_temporary_folder() if study.rollout == "vllm" else nullcontext():
        return train_here(study, run, results, attempts, on_step)


if __name__ == "__main__":
    run_cli(main)
