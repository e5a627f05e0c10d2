"""`python -m experiments.evaluate`: offline accuracy of a run's checkpoints, in one precision each.

Online accuracies cannot be compared across arms, because each arm samples in its own precision.
Here the base and the final checkpoint of every arm answer the same held-out problems in BF16 and
in NVFP4, greedily and sampled.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.arms import make_arm
from experiments.cli import run_cli
from experiments.schema import Run, Study, load_study
from qat_core.prepare import plan
from qat_core.recipe import Recipe
from qat_core.rl import resume
from qat_core.rl.config import EvaluationConfig, TaskConfig
from qat_core.rl.prompts import decode_responses, encode_prompt
from qat_core.rl.tasks import Problem, make_problems, score
from qat_core.rollout.eager import EagerEngine
from qat_core.rollout.packed import weight_stream

EVALUATION_SEED = 20_000
BATCH_PROMPTS = 256


def evaluate_run(study: Study, run: Run, results: Path) -> list[dict[str, Any]]:
    """Accuracies of a run's base (step 0) and final checkpoint, one record a setting."""
    checkpoints = {
        0: results / "base" / run.model,
        study.rl.steps: resume.step_dir(results / run.id / "checkpoints", study.rl.steps),
    }
    packed = make_arm(run.arm, study.scale, study.block_scale).rolled_out
    # the BF16 arm has no packed form of its own: it is evaluated in the fullest
    packed = packed or Recipe.full(scale=study.scale, block_scale=study.block_scale)
    return [
        {"step": step, "precision": precision, **record}
        for (step, folder), (precision, recipe) in product(
            checkpoints.items(), (("bf16", None), ("nvfp4", packed))
        )
        for record in _evaluate_checkpoint(folder, recipe, study)
    ]


def _evaluate_checkpoint(
    folder: Path, recipe: Recipe | None, study: Study
) -> Iterator[dict[str, Any]]:
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint {folder}; run the training rule first")
    engine = EagerEngine(folder, study.device)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(study.device)
    engine.sync(weight_stream(model, plan(model, recipe) if recipe else None, recipe))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems = make_problems(study.task, "test")[: study.evaluation.prompts]
    limit = study.rl.rollout.max_response_tokens
    for decoding, temperature, samples in _decodings(study.evaluation):
        repeated = [problem for problem in problems for _ in range(samples)]
        scores, lengths = [], []
        for start in range(0, len(repeated), BATCH_PROMPTS):
            batch = repeated[start : start + BATCH_PROMPTS]
            prompts = [encode_prompt(tokenizer, problem) for problem in batch]
            rollouts = engine.generate(prompts, limit, temperature, EVALUATION_SEED + start)
            scores += _scores(study.task, batch, decode_responses(tokenizer, rollouts))
            lengths += rollouts.response_mask.sum(-1).tolist()
        yield {
            "decoding": decoding,
            "prompts": len(problems),
            "samples_per_prompt": samples,
            "accuracy": sum(scores) / len(scores),
            "correct": [sum(scores[i : i + samples]) for i in range(0, len(scores), samples)],
            "response_tokens_mean": sum(lengths) / len(lengths),
        }


def _decodings(evaluation: EvaluationConfig) -> Iterator[tuple[str, float, int]]:
    yield "greedy", 0.0, 1
    yield "sampled", evaluation.temperature, evaluation.samples_per_prompt


def _scores(task: TaskConfig, problems: list[Problem], responses: list[str]) -> list[int]:
    pairs = zip(problems, responses, strict=True)
    return [int(score(task, response, problem.answer)) for problem, response in pairs]


def main() -> None:
    """Parses the command line and writes one run's eval.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", type=Path, required=True, help="study file")
    parser.add_argument("--run", required=True, help="run id")
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder")
    args = parser.parse_args()
    study = load_study(args.study)
    run = study.find_run(args.run)
    records = evaluate_run(study, run, args.results)
    out = args.results / run.id / "eval.json"
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(records, indent=1) + "\n")
    partial.replace(out)


if __name__ == "__main__":
    run_cli(main)
