"""`+nvfp4=w4a16` as Hydra composes it: keys, patterns, and what the doctor reads of it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from qat_core.doctor.signs import judge
from qat_core.doctor.verl_run import read_run
from qat_core.planning.quantization_config import quantization_config
from qat_core.planning.recipe import Recipe, matches
from qat_core.verl.configuration import complete, engine_patterns
from tests import verl_configurations
from tests.unit.doctor.test_verl_run import healthy_rows, write_log
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
    assert not actor.engine.qat.enable, "verl's own"
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


NAMES = [
    f"model.layers.{layer}.{leaf}"
    for layer in (0, 11)
    for leaf in (
        *("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "mlp.gate"),
        *("mlp.experts.3.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert_gate"),
    )
]


@pytest.mark.parametrize(
    "pattern", ["self_attn", "layers.1", "model.layers.0.mlp.down_proj", "re:.*layers[.]1.*", "a+b"]
)
def test_a_pattern_leaves_the_same_modules_in_bf16_in_trainer_and_engine(pattern: str) -> None:
    utils = pytest.importorskip(
        "vllm.model_executor.layers.quantization.compressed_tensors.utils", reason="needs vLLM"
    )
    engine = engine_patterns(Recipe(ignore=(pattern,)))
    for name in NAMES:
        is_gate = name.endswith(("mlp.gate", "shared_expert_gate"))
        is_ignored = utils.check_equal_or_regex_match(name, engine)
        assert is_ignored == (matches(pattern, name) or is_gate), name


def declared(**changes: Any) -> dict[str, Any]:
    """verl's JSON for vLLM: keys that NVFP4 does not need, and patterns of its own."""
    content = quantization_config("compressed-tensors", ["lm_head", "re:.*self_attn.*"])
    content |= {"version": "0.12", "kv_cache_scheme": None}
    for key, value in changes.items():
        content["config_groups"]["group_0"][key] = value
    return content


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    (tmp_path / "nvfp4_w4a16.json").write_text(json.dumps(declared()))
    return tmp_path / "nvfp4_w4a16.json"


def test_verls_quantization_json_is_read(json_file: Path) -> None:
    """As in verl, its `ignore` counts only where the key has no patterns."""
    given = f"{QAT}.quantization_config_path={json_file}"
    assert served(completed(given))["ignore"] == engine_patterns(FULL)
    content = completed(given, f"{QAT}.ignore_patterns=[]")
    patterns = ("lm_head", "re:.*self_attn.*")
    assert served(content)["ignore"] == engine_patterns(Recipe(ignore=patterns))
    qat = omega_conf_to_dataclass(content.actor_rollout_ref.actor).engine.qat
    assert tuple(qat.ignore_patterns) == patterns, "the trainer leaves out the same"


W4A4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MODELOPT = quantization_config("modelopt", [])
BAD_JSON: dict[str, tuple[str, str]] = {
    "none": ("", "No such file or directory"),
    "no-json": ("{", "Expecting property name"),
    "w4a4": (json.dumps(declared(input_activations=W4A4)), "input_activations: .* only None is"),
    "groups": (json.dumps(declared() | {"config_groups": {}}), "config_groups: needs to be one"),
    "format": (json.dumps(declared() | {"format": "int-quantized"}), "not NVFP4"),
    "modelopt": (json.dumps(MODELOPT), "quant_method: modelopt: give compressed-tensors"),
}


@pytest.mark.parametrize(("text", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_another_quantization_json_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "given.json"
    if text:
        file.write_text(text)
    with pytest.raises(ValueError, match=rf"quantization_config_path: .*given\.json.*{message}"):
        completed(f"{QAT}.quantization_config_path={file}")


@pytest.mark.parametrize(
    ("overrides", "verdict", "evidence"),
    [
        (["+nvfp4=off", *COMMAND[1:]], "none", "BF16 rollouts"),
        (COMMAND, "none", "QAT is on"),
        ([*COMMAND, f"{QAT}.enable=false"], "none", "BF16 rollouts"),
        (
            [*COMMAND, f"{QAT}.train=false"],
            "fault",
            "rollouts in .*, qat.enable=True, qat.train=False",
        ),
    ],
    ids=["off", "w4a16", "w4a16 not enabled", "rollouts alone"],
)
def test_quantization_without_qat_is_named(
    overrides: list[str], verdict: str, evidence: str, tmp_path: Path
) -> None:
    config = composed(*overrides)
    complete(config)
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(config, tmp_path / ".hydra" / "config.yaml")
    write_log(tmp_path / "run.jsonl", healthy_rows())
    (sign,) = (it for it in judge(read_run(tmp_path)).signs if it.name == "quantization")
    assert sign.verdict == verdict
    assert re.match(evidence, sign.evidence)
