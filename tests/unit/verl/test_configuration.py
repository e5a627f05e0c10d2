"""`+nvfp4=w4a16` in verl's own configurations, as Hydra composes them for a command."""

from pathlib import Path

import pytest
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from qat_core.planning.quantization_config import quantization_config
from qat_core.planning.recipe import Recipe
from qat_core.verl.configuration import complete, engine_patterns
from tests import verl_configurations
from tests.verl_configurations import (
    COMMAND,
    CONFIGS,
    FULL,
    QAT,
    ROLLOUT,
    completed,
    composed,
    composed_groups,
    served,
    started,
)

# as verl-recipe's dapo_qat_trainer.yaml: a search path of its own, and verl's QAT switched on
DAPO_QAT = """
hydra: {searchpath: ["file://verl/trainer/config"]}
defaults: [ppo_trainer, _self_]
reward: {reward_manager: {name: dapo}}
actor_rollout_ref:
  actor:
    fsdp_config:
      qat: {enable: true, mode: w4a16, ignore_patterns: [lm_head, "re:.*self_attn.*"]}
"""


@pytest.fixture
def dapo_qat(tmp_path: Path) -> Path:
    (tmp_path / "dapo_qat_trainer.yaml").write_text(DAPO_QAT)
    return tmp_path / "dapo_qat_trainer"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_one_line_is_enough_in_verls_own_configurations(config: Path) -> None:
    content = completed(config=config)
    assert OmegaConf.select(content, "nvfp4") is None, "taken as a plain key"
    assert served(content) == quantization_config("compressed-tensors", engine_patterns(FULL))
    actor = omega_conf_to_dataclass(content.actor_rollout_ref.actor)
    assert (actor.strategy, actor.engine.strategy) == ("fsdp2", "fsdp2")
    assert actor.engine.qat.nvfp4 and actor.engine.qat.train
    rollout = omega_conf_to_dataclass(content.actor_rollout_ref.rollout)
    assert rollout.checkpoint_engine.custom_backend_module == "qat_core.verl.engine"


def test_a_recipe_with_a_search_path_of_its_own_keeps_its_patterns(dapo_qat: Path) -> None:
    content = completed(config=dapo_qat)
    recipe = Recipe(ignore=("lm_head", "re:.*self_attn.*"))
    assert served(content)["ignore"] == engine_patterns(recipe)
    assert content.reward.reward_manager.name == "dapo"


@pytest.mark.parametrize("override", ["++nvfp4=w4a16", "nvfp4=w4a16", "+nvfp4=w4a61"])
def test_a_typing_error_in_the_line_is_refused(override: str) -> None:
    with pytest.raises(HydraException, match="nvfp4"):
        composed(override)


def test_where_the_package_is_missing_the_longer_line_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shorter one is then a key of the user's own to Hydra, and the run is BF16."""
    monkeypatch.setattr(verl_configurations, "composed_groups", composed_groups.__wrapped__)
    found = {plugin.__name__: plugin for plugin in Plugins.instance().discover(SearchPathPlugin)}
    monkeypatch.setattr(found["NvFp4SearchPath"], "manipulate_search_path", lambda *_: None)
    assert composed("+nvfp4=w4a16").nvfp4 == "w4a16"
    with pytest.raises(HydraException, match="nvfp4"):
        composed("+nvfp4@_global_=w4a16")


def test_to_verls_own_engine_qat_is_off_whatever_was_set() -> None:
    actor = omega_conf_to_dataclass(completed().actor_rollout_ref.actor)
    assert not actor.engine.qat.enable


@pytest.mark.verl_table(
    "a user's `model.external_lib`, `checkpoint_engine.custom_backend_module`",
    "imported after this project's own",
    cases=["model.external_lib", "rollout.checkpoint_engine.custom_backend_module"],
)
@pytest.mark.parametrize(
    "key", ["model.external_lib", "rollout.checkpoint_engine.custom_backend_module"]
)
def test_a_users_own_module_is_imported_after_this_projects(key: str) -> None:
    content = completed(f"actor_rollout_ref.{key}=users.module")
    modules = OmegaConf.select(content, f"actor_rollout_ref.{key}")
    assert list(modules) == ["qat_core.verl.engine", "users.module"]
    rollout = omega_conf_to_dataclass(content.actor_rollout_ref.rollout)
    found = rollout.checkpoint_engine.custom_backend_module
    assert isinstance(found, list | str), "verl imports each module of a list, no other sequence"


@pytest.mark.parametrize(
    "overrides",
    [["+nvfp4=w4a16"], ["+nvfp4=w4a16", f"{QAT}.enable=false"], ["+nvfp4=off"]],
    ids=["nvfp4", "enable: false", "off"],
)
def test_every_worker_that_builds_actor_or_reference_imports_the_engine(
    overrides: list[str],
) -> None:
    """verl imports a model's `external_lib` wherever it reads the settings of that model."""
    content = composed(*overrides, *COMMAND[1:])
    complete(content)
    assert content.actor_rollout_ref.model.external_lib == "qat_core.verl.engine"


def test_enable_false_is_bf16_everywhere() -> None:
    content = completed(f"{QAT}.enable=false")
    assert served(content) is None
    assert "quantization" not in content.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert not omega_conf_to_dataclass(content.actor_rollout_ref.actor).engine.qat.nvfp4


def test_nvfp4_rollouts_of_a_bf16_trainer_have_their_own_switch() -> None:
    content = completed(f"{QAT}.train=false")
    assert served(content) is not None
    qat = omega_conf_to_dataclass(content.actor_rollout_ref.actor).engine.qat
    assert qat.nvfp4 and not qat.train


def test_overrides_of_the_model_stay_and_completing_again_changes_nothing() -> None:
    content = completed(f"+{ROLLOUT}.engine_kwargs.vllm.hf_overrides.max_position_embeddings=64")
    overrides = content.actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides
    assert overrides.max_position_embeddings == 64
    before = OmegaConf.to_yaml(content)
    complete(content)
    assert OmegaConf.to_yaml(content) == before


def test_an_unexpected_error_does_not_start_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: DictConfig) -> None:
        raise KeyError("x")

    monkeypatch.setattr("qat_core.verl.configuration.complete", fails)
    with pytest.raises(SystemExit, match=r"error: \+nvfp4: KeyError: 'x'"):
        started(*COMMAND)
