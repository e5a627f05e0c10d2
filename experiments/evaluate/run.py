"""`python -m experiments.evaluate.run`: offline accuracy of a run's checkpoints, by precision.

Online accuracies cannot be compared across arms, because each arm samples in its own precision.
Here the base and every saved checkpoint of every arm answer the same held-out problems in BF16 and
in NVFP4. Several runs take one import, and what they share, a base in a precision, is asked once.
With `--device cpu` eval.json says so: the same weights do not sample the same answers there.
"""

import argparse
from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, get_args

from experiments.rl.tasks import Question, make_problems
from experiments.runs.evaluation import Evaluation, Precision, write_evaluations
from experiments.runs.inputs import check_base, check_data
from experiments.runs.manifest import MANIFEST, read_manifest
from experiments.study.load import load_study
from experiments.study.schema import Run, Study
from experiments.support.cli import RESULTS, RUNS, STUDY, run_cli
from experiments.support.folders import sole_process
from experiments.support.gpu_locks import reserved_devices
from experiments.support.json_files import REMAKE
from experiments.support.signals import raise_stop_signals
from experiments.support.subprocess_call import call_in_subprocess
from experiments.verl.questions import read_questions


def evaluate_run(
    study: Study,
    run: Run,
    results: Path,
    *,
    on_cpu: bool = False,
    of_bases: dict[Any, list[Evaluation]] | None = None,
) -> list[Evaluation]:
    """Evaluations of a run's base (step 0) and saved checkpoints, by step.

    Those of bases, in this study and place, are taken from `of_bases`, and added to it.
    """
    # torch: help and mistakes do not wait for it
    from experiments.evaluate.checkpoints import find_checkpoints, model_folder, remove_merged
    from experiments.evaluate.evaluator import EvaluationJob, evaluate

    questions = _held_out_questions(study, results)[: study.evaluation.prompts]
    if on_cpu:
        study = study.model_copy(update={"device": "cpu"})
    check_base(results / "base" / study.base_of(run))
    saved = find_checkpoints(results / run.id / "checkpoints")
    _require_last(saved, results / run.id)
    with ExitStack() as stack:
        run_dir = results / run.id
        stack.enter_context(sole_process(run_dir / "evaluation.lock", run_dir, "evaluates"))
        remove_merged(run_dir / "checkpoints")
        merged = {step: stack.enter_context(model_folder(path)) for step, path in saved.items()}
        base = {0: results / "base" / study.base_of(run)}
        job = EvaluationJob(study, run, merged, questions)
        stack.enter_context(reserved_devices(study.device, 1, study.gpu_memory_gib))
        is_eager = study.rollout == "eager"
        # vLLM's CUDA graphs and memory need a process of their own for each precision
        call = evaluate if is_eager else partial(call_in_subprocess, evaluate)
        done, of_bases = [], {} if of_bases is None else of_bases
        for precision in get_args(Precision):
            # arms are asked the same, with the same seed
            shared = study.base_of(run), run.seed, job.recipe(precision)
            known = of_bases.get(shared)
            found = call(job if known else job._replace(folders=base | merged), precision)
            of_bases[shared] = known or [it for it in found if it.step == 0]
            done += [*(known or ()), *found]
    return sorted(done, key=lambda evaluation: evaluation.step)


def _require_last(saved: Collection[int], run_dir: Path) -> None:
    """Else an earlier checkpoint would be taken for the last one."""
    if not (run_dir / MANIFEST).is_file():
        return
    manifest = read_manifest(run_dir, REMAKE)
    last = manifest.planned_steps
    if manifest.status == "finished" and last is not None and last not in saved:
        raise ValueError(
            f"{run_dir / 'checkpoints'}: no checkpoint of step {last}, the run's last; restore it, "
            f"or delete {run_dir} and run the study again"
        )


def _held_out_questions(study: Study, results: Path) -> list[Question]:
    if study.trainer == "verl":
        data = results / "data" / study.study
        check_data(data)
        return list(read_questions(data / "test.parquet"))
    return [*make_problems(study.task, "test")]


def main() -> None:
    """Parses the command line and writes the eval.json of runs."""
    parser = argparse.ArgumentParser(description=__doc__, parents=[STUDY, RUNS, RESULTS])
    parser.add_argument("--device", choices=["cpu"], help="by default the study's")
    args = parser.parse_args()
    raise_stop_signals()
    study = load_study(args.study)
    of_bases: dict[Any, list[Evaluation]] = {}
    for run in map(study.find_run, args.run):
        on_cpu = args.device == "cpu"
        done = evaluate_run(study, run, args.results, on_cpu=on_cpu, of_bases=of_bases)
        write_evaluations(args.results / run.id, done)


if __name__ == "__main__":
    run_cli(main)
