"""What a recipe may not say: the run would then be another one than its study's, in silence.

A key of the study's own, a section that is replaced by a value, and the keys of a table.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from experiments.study.schema import Study
from experiments.study.verl_settings import Setting

Settings = Mapping[str, Setting]
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
MOST_NAMES = 4


class Rule(NamedTuple):
    """A key or a section of verl's, the values that a recipe may give it, and why no others."""

    key: str
    allows: Callable[[Any], bool]
    fix: str


def _never(_: Any) -> bool:
    return False


def _only(allowed: Any) -> Callable[[Any], bool]:
    return lambda value: type(value) is type(allowed) and value == allowed


def _has_file(loggers: Any) -> bool:
    return loggers == "file" or (isinstance(loggers, list) and "file" in loggers)


RULES = (
    # of what the study says in keys of its own, under other names of verl's
    Rule(
        f"{ACTOR}.fsdp_config.qat",
        _never,
        "an arm says what is trained and served in NVFP4; remove it, and use the study's arms, "
        "scale_policy and block_scale_method",
    ),
    Rule(f"{ROLLOUT}.prompt_length", _never, "remove it; rl.rollout.max_prompt_tokens says it"),
    Rule(f"{ROLLOUT}.response_length", _never, "remove it; rl.rollout.max_response_tokens says it"),
    Rule(
        f"{ROLLOUT}.ignore_eos",
        _only(False),
        "rollouts would go on after an answer's end, and offline answers would not; use false",
    ),
    Rule(
        f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides",
        _never,
        "vLLM would serve another model than is trained; remove it, and change the model's config",
    ),
    *(
        Rule(
            f"data.{split}_max_samples",
            _only(-1),
            "leaves out problems of the study's task; use -1",
        )
        for split in ("train", "val")
    ),
    Rule("trainer.critic_warmup", _only(0), "the first of rl.steps would not train; use 0"),
    Rule("trainer.val_only", _only(False), "none of rl.steps would be done; use false"),
    # of what the harness reads of a run, or does with it
    Rule(
        "trainer.logger",
        _has_file,
        "the harness follows the steps in verl's file; add file, as in [console, file, wandb]",
    ),
    Rule(
        f"{ROLLOUT}.calculate_log_probs",
        _only(True),
        "there is no k3 KL without the rollouts' log-probs; use true",
    ),
    Rule(
        "algorithm.rollout_correction.bypass_mode",
        _only(False),
        "there is no k3 KL without the trainer's own log-probs; use false",
    ),
    Rule(
        f"{ROLLOUT}.tensor_model_parallel_size",
        _only(1),
        "the memory of weights is predicted and measured of engines that hold a whole model; use 1",
    ),
    *(
        Rule(
            key, allows, "offline evaluation prompts with the base's chat template alone; remove it"
        )
        for key, allows in (
            ("data.apply_chat_template_kwargs", _never),
            (f"{MODEL}.custom_chat_template", _only(None)),
        )
    ),
    Rule(
        "trainer.resume_mode",
        _only("auto"),
        "the harness chooses the checkpoint that a run goes on from; use auto",
    ),
    Rule(
        f"{ACTOR}.checkpoint.async_save",
        _only(False),
        "verl would not say which checkpoints are complete; use false",
    ),
)


def require_study_as_it_is(study: Study, recipe: Settings, own: Settings) -> None:
    """Refuses a recipe with which a run would not be what its study says.

    Args:
        study: with `trainer: verl`.
        recipe: what a run's recipe sets.
        own: what its study sets.
    """
    rules = (*RULES, _rule_of_length(study))
    problems = [
        f"{setting.source}: {key}: {problem}"
        for key, setting in recipe.items()
        for problem in _find_problems(key, setting.value, own, rules)
    ]
    problems += _values_of_sections(recipe, own)
    if problems:
        raise ValueError("\n".join(problems))


def _rule_of_length(study: Study) -> Rule:
    lengths = study.rl.rollout
    tokens = lengths.max_prompt_tokens + lengths.max_response_tokens
    return Rule(
        f"{ROLLOUT}.max_model_len",
        lambda value: value is None or (isinstance(value, int) and value >= tokens),
        f"shorter than rl.rollout's prompt and response together; use {tokens} or more",
    )


def _find_problems(key: str, value: Any, own: Settings, rules: tuple[Rule, ...]) -> Iterator[str]:
    if key in own:
        yield "comes from the study; remove it here"
        return
    for rule in rules:
        if _is_at_or_below(key, rule.key) and not rule.allows(value):
            yield f"{json.dumps(value, default=str)}: {rule.fix}"


def _values_of_sections(recipe: Settings, own: Settings) -> Iterator[str]:
    """As `filter_groups: null` where another file has `filter_groups.enable`."""
    settings = {**recipe, **own}
    for key, (value, source) in recipe.items():
        section = key.replace("+", "")
        below = [it for it in settings if it != key and _is_at_or_below(it, section)]
        if below:
            names = ", ".join(it.rpartition(".")[2] for it in below[:MOST_NAMES])
            yield (
                f"{source}: {key}: {json.dumps(value, default=str)} in place of a section, of "
                f"which {settings[below[0]].source} sets keys; write such keys below it: {names}"
            )


def _is_at_or_below(key: str, section: str) -> bool:
    """Whether a key, with or without "+", is that one or of that section."""
    return f"{key.replace('+', '')}.".startswith(f"{section}.")
