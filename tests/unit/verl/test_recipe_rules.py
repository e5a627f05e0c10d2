"""A recipe with which a run would not be what its study says is refused, with file, key and fix."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.study.load import load_study
from experiments.study.schema import STUDIES
from experiments.study.verl_settings import RECIPES, Setting
from experiments.verl.command import run_paths, run_settings
from experiments.verl.recipe_rules import HARNESS_RULES, STUDY_RULES

NANO = load_study(STUDIES / "verl_nano.yaml")
TOKENS = NANO.rl.rollout.max_prompt_tokens + NANO.rl.rollout.max_response_tokens
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
QAT = f"{ACTOR}.fsdp_config.qat"
MINE = "experiments/recipes/variants/mine.yaml"
SetIn = Callable[..., dict[str, Setting]]


@pytest.fixture
def set_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetIn:
    """What a run of an arm sets with a variant of these contents."""
    recipes = tmp_path / "experiments" / "recipes"
    shutil.copytree(RECIPES, recipes)
    monkeypatch.setattr("experiments.study.verl_settings.RECIPES", recipes)
    study = NANO.model_copy(update={"variant": ("mine",)})

    def settings(variant: dict[str, Any], arm: str = "nvfp4-qat") -> dict[str, Setting]:
        (recipes / "variants" / "mine.yaml").write_text(yaml.safe_dump(variant))
        run = study.find_run(f"nano-dense-verl_{arm}_seed0")
        return run_settings(study, run, run_paths(study, run, Path(), Path(), Path()))

    return settings


REFUSED = [
    (f"{QAT}.ignore_patterns", ["lm_head", "re:.*attn.*"], "an arm says what is trained and"),
    (f"{QAT}.enable", False, "an arm says what is trained and served in NVFP4; remove it, and"),
    (f"{QAT}.quantization_config_path", "x.json", "an arm says what is trained and served in"),
    (f"{ROLLOUT}.prompt_length", 8, "remove it; rl.rollout.max_prompt_tokens says it"),
    (f"{ROLLOUT}.response_length", 8, "remove it; rl.rollout.max_response_tokens says it"),
    (f"{ROLLOUT}.max_model_len", TOKENS - 1, "shorter than rl.rollout's prompt and response"),
    (f"{ROLLOUT}.ignore_eos", True, "rollouts would go on after an answer's end, and offline"),
    (
        f"{ROLLOUT}.engine_kwargs.vllm.+hf_overrides.rope_theta",
        1,
        "vLLM would serve another model than is trained; remove it, and change the model's config",
    ),
    ("data.train_max_samples", 8, "leaves out problems of the study's task; use -1"),
    ("data.val_max_samples", 8, "leaves out problems of the study's task; use -1"),
    ("trainer.critic_warmup", 2, "the first of rl.steps would not train; use 0"),
    ("trainer.val_only", True, "none of rl.steps would be done; use false"),
    ("trainer.logger", ["console", "wandb"], "the harness follows the steps in verl's file; add"),
    ("trainer.logger", "console", "the harness follows the steps in verl's file; add file, as in"),
    (f"{ROLLOUT}.calculate_log_probs", False, "there is no k3 KL without the rollouts' log-probs"),
    ("algorithm.rollout_correction.bypass_mode", True, "there is no k3 KL without the trainer's"),
    (f"{ROLLOUT}.tensor_model_parallel_size", 2, "the memory of weights is predicted and measured"),
    ("data.apply_chat_template_kwargs.enable_thinking", False, "offline evaluation prompts with"),
    ("actor_rollout_ref.model.custom_chat_template", "{{ x }}", "offline evaluation prompts with"),
    ("trainer.resume_mode", "disable", "the harness chooses the checkpoint that a run goes on"),
    (f"{ACTOR}.checkpoint.async_save", True, "verl would not say which checkpoints are complete"),
]


@pytest.mark.parametrize("arm", ["bf16", "nvfp4-qat"])
@pytest.mark.parametrize(
    ("key", "value", "line"), REFUSED, ids=[f"{key}={value}" for key, value, _ in REFUSED]
)
def test_key_that_makes_another_run_is_refused(
    set_in: SetIn, key: str, value: Any, line: str, arm: str
) -> None:
    with pytest.raises(ValueError) as caught:
        set_in({key: value}, arm)
    (message,) = str(caught.value).splitlines()
    assert message.startswith(f"{MINE}: {key}: ") and f": {line}" in message


def test_every_rule_has_a_case() -> None:
    keys = [key.replace("+", "") for key, *_ in REFUSED]
    for rule in (*STUDY_RULES, *HARNESS_RULES):
        assert any(f"{key}.".startswith(f"{rule.key}.") for key in keys), rule.key


def test_the_refused_keys_are_verls_own() -> None:
    pytest.importorskip("verl", reason="needs requirements/engines.txt")
    from omegaconf import OmegaConf

    from experiments.verl.known_keys import _compose, _find_problem

    listed = OmegaConf.to_container(_compose(()))
    assert isinstance(listed, dict)
    for rule in (*STUDY_RULES, *HARNESS_RULES):
        key = rule.key.replace("vllm.", "vllm.+")  # what vLLM knows, verl does not list
        assert _find_problem(key, listed) is None, key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.logger", ["console", "file", "wandb"]),
        ("trainer.logger", "file"),
        (f"{ROLLOUT}.max_model_len", TOKENS),
        (f"{ROLLOUT}.tensor_model_parallel_size", 1),
        ("actor_rollout_ref.model.custom_chat_template", None),
        ("trainer.resume_mode", "auto"),
    ],
)
def test_value_with_which_the_run_is_the_same_is_accepted(
    set_in: SetIn, key: str, value: Any
) -> None:
    assert set_in({key: value})[key] == Setting(value, MINE)


def test_each_refused_key_has_its_line(set_in: SetIn) -> None:
    with pytest.raises(ValueError) as caught:
        set_in({"trainer": {"val_only": True, "critic_warmup": 1}})
    keys = [line.split(": ")[1] for line in str(caught.value).splitlines()]
    assert sorted(keys) == ["trainer.critic_warmup", "trainer.val_only"]


BASE, OF_NANO = "experiments/recipes/base.yaml", "experiments/recipes/nano/recipe.yaml"
SECTIONS = {
    "null": (
        {"algorithm": {"filter_groups": None}},
        f"algorithm.filter_groups: null in place of a section, of which {OF_NANO} sets keys; write "
        "such keys below it: enable, metric, max_inflight_gen_batches, max_num_gen_batches",
    ),
    "below a plus": (
        {"reward": {"+reward_kwargs": {"overlong_buffer_cfg": None}}},
        "reward.+reward_kwargs.overlong_buffer_cfg: null in place of a section, of which "
        f"{OF_NANO} sets keys; write such keys below it: enable, len, penalty_factor, log",
    ),
    "list": (
        {"ray_kwargs": []},
        f"ray_kwargs: [] in place of a section, of which {BASE} sets keys; write such keys below",
    ),
    "of the study": (
        {"actor_rollout_ref": {"actor": {"optim": None}}},
        f"{ACTOR}.optim: null in place of a section, of which the study sets keys; write such",
    ),
}


@pytest.mark.parametrize(("variant", "line"), SECTIONS.values(), ids=SECTIONS)
def test_value_in_place_of_a_section_is_refused(
    set_in: SetIn, variant: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError) as caught:
        set_in(variant)
    (message,) = str(caught.value).splitlines()
    assert message.startswith(f"{MINE}: {line}")
