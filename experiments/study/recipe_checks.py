"""Checks of a study with `trainer: verl` together with what the recipes of its runs set."""

from collections.abc import Iterator

from experiments.rl.tasks import GENERATED_TASKS
from experiments.study.schema import Study

# a recipe's: verl fills micro-batches by tokens, not by rl.micro_batch_responses
DYNAMIC_BATCHES = "actor_rollout_ref.actor.use_dynamic_bsz"
ROLLOUT = "actor_rollout_ref.rollout"
SLEEP = f"{ROLLOUT}.free_cache_engine"
CACHE_BYTES = f"{ROLLOUT}.engine_kwargs.vllm.+kv_cache_memory_bytes"
UTILIZATION = f"{ROLLOUT}.gpu_memory_utilization"
SAVED = "actor_rollout_ref.actor.checkpoint.save_contents"
LARGEST_UTILIZATION = 0.1  # where the cache has a size, all that it says is what has to be free
LONG_PENALTY = "reward.+reward_kwargs.overlong_buffer_cfg.enable"


def check_gpu_shares(study: Study) -> Iterator[str]:
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


def check_checkpoints(study: Study) -> Iterator[str]:
    """A run goes on from any checkpoint but the last one, and needs the optimizer's state there."""
    contents = (study.recipe_of(run).get(SAVED) for run in study.runs)
    is_whole = all(saved is None or "optimizer" in saved.value for saved in contents)
    longest = max(study.runs, key=lambda run: study.rl_of(run.cell).steps)
    most_steps = study.rl_of(longest.cell).steps
    if study.rl.save_every < most_steps and not is_whole:
        yield (
            f"rl.save_every: {study.rl.save_every} makes checkpoints to go on from, but variant "
            f"{', '.join(study.variant)} saves no optimizer states; use "
            f"{study.key_of(longest.cell, 'steps')}, {most_steps}, or another variant"
        )


def check_scores(study: Study) -> Iterator[str]:
    """Rewards are to be 1 or 0: as advantages, and where half of the best one is a collapse."""
    for run in study.runs:
        asking = []
        if study.rl_of(run.cell).advantage == "reward":
            asking.append((f"{study.key_of(run.cell, 'advantage')}: reward", "group"))
        if study.judged_by == "collapse":
            asking.append(("judged_by: collapse", "parity"))
        recipe = study.recipe_of(run)
        for asked, other in asking:
            needs = f"{asked} is for answers scored 1 or 0"
            if study.task.name not in GENERATED_TASKS:
                yield f"{needs}, not as {study.task.name}'s are; use {other}"
            if LONG_PENALTY in recipe and recipe[LONG_PENALTY].value:
                yield (
                    f"{needs}, and {LONG_PENALTY} lowers the score of long ones; set it to false, "
                    f"as recipe: nano does, or use {other}"
                )


def check_shared_gpus(study: Study) -> Iterator[str]:
    """Runs of verl share a GPU only if vLLM does not take one of its own for granted."""
    if study.gpu_memory_gib is None:
        return
    if study.device != "cuda":
        yield "gpu_memory_gib: runs share GPUs with device: cuda alone; remove it"
    if study.trainer != "verl":
        return
    recipes = [study.recipe_of(run) for run in study.runs]
    if not all(SLEEP in recipe and recipe[SLEEP].value is False for recipe in recipes):
        yield (
            f"gpu_memory_gib: vLLM asleep counts the memory of other runs; set {SLEEP}: false, as "
            "variant: wide does, or remove it"
        )
    if not all(CACHE_BYTES in recipe for recipe in recipes):
        yield (
            f"gpu_memory_gib: vLLM measures memory that other runs take; set {CACHE_BYTES}, as "
            "recipe: nano does, or remove it"
        )
    if any(recipe[UTILIZATION].value > LARGEST_UTILIZATION for recipe in recipes):
        yield (
            "gpu_memory_gib: vLLM does not start beside runs that hold the memory it wants free; "
            f"set {UTILIZATION}: {LARGEST_UTILIZATION} or less, as recipe: nano does, or remove it"
        )
