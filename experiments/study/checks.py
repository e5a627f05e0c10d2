"""What a study file may say section by section, but not as a whole."""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from experiments.study.models import HubModel
from experiments.study.yaml_file import suggest
from experiments.verl.recipe import known_recipes, known_variants
from qat_core.rl.config import TaskConfig
from qat_core.rl.tasks import GENERATED_TASKS

if TYPE_CHECKING:
    from experiments.study.schema import Study

# a recipe's: verl fills micro-batches by tokens, not by rl.micro_batch_responses
DYNAMIC_BATCHES = "actor_rollout_ref.actor.use_dynamic_bsz"


def find_contradictions(study: "Study") -> Iterator[str]:
    """Each as "<dotted key>: <what>; <mend>"; take the first, as the next rely on its mend."""
    of_trainer = _mistakes_of_verl if study.trainer == "verl" else _mistakes_of_local
    return chain(of_trainer(study), _mistakes_of_task(study))


def _mistakes_of_local(study: "Study") -> Iterator[str]:
    if study.task.name not in GENERATED_TASKS:
        yield f"task.name: only trainer: verl reads the files of {study.task.name}; use verl"
    for name, model in study.models.items():
        if isinstance(model, HubModel):
            yield (
                f"models.{name}.kind: the local trainer loads no hub checkpoint; use "
                "trainer: verl, or kind: scratch or gguf"
            )
        if model.recipe is not None:
            yield f"models.{name}.recipe: only trainer: verl reads it; remove it"
    for key in ("gpus", "variant", "kl_gate"):
        if key in study.model_fields_set:
            yield f"{key}: only trainer: verl reads it; remove it"


def _mistakes_of_verl(study: "Study") -> Iterator[str]:
    if study.rollout != "vllm":
        yield f"rollout: verl rolls out with vllm, not {study.rollout}; use vllm"
    for name, model in study.models.items():
        yield from _unless_known(f"models.{name}.recipe", model.recipe, known_recipes())
    if study.variant is not None:
        yield from _unless_known("variant", study.variant, known_variants())
    gate = study.kl_gate
    if gate is not None and gate.steps < study.rl.save_every:
        yield (
            f"kl_gate.steps: {gate.steps} may end a run before its first checkpoint, which is "
            f"evaluated; use rl.save_every, {study.rl.save_every}, or more"
        )
    yield from _mistakes_of_shares(study)


def _mistakes_of_shares(study: "Study") -> Iterator[str]:
    """What verl asserts of a GPU's share of the responses, once Ray has started."""
    rl, gpus = study.rl, study.gpus
    mini_batch_responses = rl.mini_batch_prompts * rl.responses_per_prompt
    if mini_batch_responses % gpus:
        yield (
            f"gpus: {gpus} does not divide rl.mini_batch_prompts times rl.responses_per_prompt, "
            f"{mini_batch_responses}; use one of its divisors"
        )
    share = mini_batch_responses // gpus
    is_dynamic = (study.recipe_of(run)[DYNAMIC_BATCHES].value for run in study.runs)
    if share % rl.micro_batch_responses and not all(is_dynamic):
        yield (
            f"rl.micro_batch_responses: {rl.micro_batch_responses} does not divide the {share} "
            f"responses of a mini-batch on one of {gpus} GPUs; use one of its divisors"
        )


def _mistakes_of_task(study: "Study") -> Iterator[str]:
    """What asks for more problems than the task has."""
    task, a_step, evaluated = study.task, study.rl.prompts_per_step, study.evaluation.prompts
    if task.name not in GENERATED_TASKS:
        for name, model in study.models.items():
            if not isinstance(model, HubModel) and model.pretrain is not None:
                yield f"models.{name}.pretrain: {task.name} has no worked answers; remove it"
        return  # how many problems its files hold is known once they are there
    if a_step > task.train_prompts:
        yield (
            f"rl.prompts_per_step: {a_step} is more than task.train_prompts, "
            f"{task.train_prompts}; lower it or raise train_prompts"
        )
    wanted = task.train_prompts + task.test_prompts
    if _count_problems(task) < wanted:
        yield (
            f"task: terms {list(task.terms)} and largest {task.largest} give only "
            f"{_count_problems(task)} different problems, not {wanted}; widen them or lower "
            "train_prompts"
        )
    if evaluated > task.test_prompts:
        yield (
            f"evaluation.prompts: {evaluated} is more than task.test_prompts, {task.test_prompts}; "
            "lower it or raise test_prompts"
        )


def _count_problems(task: TaskConfig) -> int:
    """Each term takes the sum, between 0 and `largest`, to any other; words tell it 36 ways."""
    fewest, most = task.terms
    chains: int = sum(task.largest**terms for terms in range(fewest, most + 1))
    return chains * (36 if task.name == "word-problem" else 1)


def _unless_known(key: str, name: str | None, known: list[str]) -> Iterator[str]:
    if name not in known:
        mend = suggest(name or "", known, f"use one of {', '.join(known)}")
        yield f"{key}: {f'no recipe {name}' if name else 'missing'}; {mend}"
