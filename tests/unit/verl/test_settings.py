"""Settings, models and data that verl cannot use, or with which a run would not be what its study
says, are refused with file, key and fix before anything starts.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from experiments.study.load import load_study
from experiments.study.schema import STUDIES
from experiments.study.verl_settings import RECIPES, Setting
from experiments.verl.command import run_paths, run_settings
from experiments.verl.recipe_rules import RULES

pytest.importorskip("hydra", reason="needs requirements/engines.txt")
pytest.importorskip("verl", reason="needs requirements/engines.txt")

from omegaconf import OmegaConf

from experiments.study.verl_settings import known_variants
from experiments.verl.command import to_tree, to_yaml
from experiments.verl.preflight import require_known, require_known_settings

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
    for rule in RULES:
        assert any(f"{key}.".startswith(f"{rule.key}.") for key in keys), rule.key


def test_the_refused_keys_are_verls_own() -> None:
    from experiments.verl.preflight import _compose, _find_problem

    listed = OmegaConf.to_container(_compose(()))
    for rule in RULES:
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


# what YAML 1.1, Hydra's override grammar or a number in disguise could turn into something else
TRICKY = ["off", "1e-6", "null", "a=b,c", "it's", "[x]", "\\d+", "~", "08", "", "1.5E+3", "-2e4"]


@given(
    st.dictionaries(st.sampled_from(["a.b", "a.+c", "d"]), st.sampled_from([*TRICKY, 1e-06, None]))
)
def test_hydra_reads_back_what_is_written(settings: dict[str, Any]) -> None:
    tree = to_tree(settings)
    assert OmegaConf.to_container(OmegaConf.create(to_yaml(tree)), resolve=True) == tree


def test_key_with_a_plus_is_added_without_it() -> None:
    assert to_tree({"a.+b.c": 1, "a.d": 2}) == {"a": {"b": {"c": 1}, "d": 2}}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_smoke", "verl_nano"])
def test_verl_knows_all_that_the_arms_of_a_study_set(name: str) -> None:
    study = load_study(STUDIES / f"{name}.yaml")
    require_known_settings(study, study.runs)


@pytest.mark.parametrize("variant", known_variants())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_verl_knows_all_that_a_variant_sets(variant: str, device: str) -> None:
    study = load_study(STUDIES / "qwen3.yaml")
    changed = study.model_copy(update={"variant": (variant,), "device": device})
    require_known_settings(changed, changed.runs[:1])


UNKNOWN = {
    "typo": ("data.max_promt_length", "unknown to verl; did you mean max_prompt_length?"),
    "typo of a section": ("actr_rollout_ref.actor.strategy", "unknown to verl; did you mean actor"),
    "no near one": ("reward.zzz.yyy", "unknown to verl; it has _target_, num_workers, "),
    "below a value": ("data.seed.x", "unknown to verl; it has nothing here"),
    "in an empty section": ("actor_rollout_ref.model.override_config.x", "unknown to verl; it has"),
    "plus before a listed one": ("data.+seed", "verl lists seed; remove the +"),
    "plus below an unknown section": ("dta.+seed", "unknown to verl; did you mean data?"),
    "unknown choice": ("+nvfp4", "1: no such choice; use +"),
    "unknown group": ("+nvfp5", "1: no such choice; use +"),
}


@pytest.mark.parametrize(("key", "line"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_unknown_key_names_file_and_fix(key: str, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        require_known({key: Setting(1, "recipes/x.yaml")})
    assert str(caught.value).startswith(f"recipes/x.yaml: {key}: {line}")


def test_value_that_hydra_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match=r"verl's configuration: .*correct the recipe"):
        require_known({"data.seed": Setting("${", "recipes/x.yaml")})


def test_what_the_plugin_refuses_is_refused_before_a_run_starts() -> None:
    settings = {"+nvfp4": "w4a16", "actor_rollout_ref.rollout.name": "sglang"}
    with pytest.raises(ValueError, match=r"by the recipe: .*rollout\.name: sglang: "):
        require_known({key: Setting(value, "recipes/x.yaml") for key, value in settings.items()})
