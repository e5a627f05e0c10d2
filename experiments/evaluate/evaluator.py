"""Evaluates checkpoints of a run on held-out questions, in one precision by one rollout engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from experiments.rl.prompts import decode_responses, encode_prompt
from experiments.rl.tasks import Question
from experiments.runs.evaluation import Evaluation, Precision
from experiments.study.arms import ARMS, make_recipe
from experiments.study.schema import Run, Study
from experiments.verl.reward import compute_score
from experiments.verl.verifier import verifier_of
from qat_core.bf16_on_cpu import multiply_bf16_in_fp32
from qat_core.checkpoint.load import load_model
from qat_core.planning.plan import bf16_plan, plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.engine import RolloutEngine
from qat_core.rollout.start import start_engine
from qat_core.weights.stream import weight_stream

# of sampled answers; seeds of a study are draws of their own, its arms share them
EVALUATION_SEED = 20_000
SEED_STRIDE = 1_000_000
# responses in flight: the eager engine waits for the longest, vLLM starts the next one
BATCH_RESPONSES = {"eager": 512, "vllm": 2048}


class EvaluationJob(NamedTuple):
    """Which checkpoints of a run answer which questions."""

    study: Study
    run: Run
    folders: Mapping[int, Path]  # checkpoints by step; the first one's tokenizer is used for all
    questions: list[Question]

    def recipe(self, precision: Precision) -> Recipe | None:
        """What is packed; the BF16 arm, which packs nothing in training, is packed in full."""
        if precision == "bf16":
            return None
        name = ARMS[self.run.arm].rollout_recipe or "full"
        return make_recipe(name, self.study.scale_policy, self.study.block_scale_method)


def evaluate(job: EvaluationJob, precision: Precision) -> list[Evaluation]:
    """Evaluations of all checkpoints by step, served one after the other by the same engine."""
    multiply_bf16_in_fp32()
    recipe, evaluations = job.recipe(precision), []
    first = next(iter(job.folders.values()))
    tokenizer = AutoTokenizer.from_pretrained(first)
    prompts = [encode_prompt(tokenizer, question) for question in job.questions]
    engine: RolloutEngine | None = None
    for step, folder in job.folders.items():
        model = load_model(folder)
        served = plan(model, recipe) if recipe else None
        engine = engine or start_engine(
            job.study.rollout,
            first,
            job.study.device,
            served,
            max(map(len, prompts)) + job.study.rl.rollout.max_response_tokens,
            beside_trainer=False,
            gpu_memory_gib=job.study.gpu_memory_gib,
        )
        expected = served or bf16_plan(model)
        # of a model in main memory, packed on the device
        stream = weight_stream(model, expected, recipe or Recipe.full(), job.study.device)
        engine.sync(stream, expected=expected)
        done = Evaluation(
            step=step,
            precision=precision,
            settings=job.study.evaluation,
            device=job.study.device,
            verifier=verifier_of(job.study.task.name),
            **_count_right_answers(job, tokenizer, prompts, engine),
        )
        told = f"{job.run.id:<28} step {step:>3}  {precision:<5}  accuracy {done.accuracy:.3f}"
        print(told, flush=True)
        evaluations.append(done)
    return evaluations


def _count_right_answers(
    job: EvaluationJob, tokenizer: Tokenizer, prompts: list[list[int]], engine: RolloutEngine
) -> dict[str, Any]:
    """The part of an `Evaluation` that depends on the answers."""
    limit = job.study.rl.rollout.max_response_tokens
    seed = EVALUATION_SEED + job.run.seed * SEED_STRIDE
    batch_size = BATCH_RESPONSES[job.study.rollout]
    samples = job.study.evaluation.samples_per_prompt
    asked = [i for i in range(len(prompts)) for _ in range(samples)]
    correct, lengths = [0] * len(prompts), []
    for start in range(0, len(asked), batch_size):
        batch = asked[start : start + batch_size]
        rollouts = engine.generate(
            [prompts[i] for i in batch], limit, job.study.evaluation.temperature, seed + start
        )
        responses = decode_responses(tokenizer, rollouts)
        for i, response in zip(batch, responses, strict=True):
            answer = job.questions[i].answer
            correct[i] += int(compute_score(job.study.task.name, response, answer)["acc"])
        lengths += rollouts.response_mask.sum(-1).tolist()
    return {
        "decoding": "sampled",
        "prompts": len(prompts),
        "samples_per_prompt": samples,
        "accuracy": sum(correct) / len(asked),
        "correct": correct,
        "response_tokens_mean": sum(lengths) / len(lengths),
    }
