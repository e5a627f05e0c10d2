"""What `+nvfp4=...` means, worked out when Hydra has composed a command, before Ray starts.

The YAML groups hold the user's keys; this callback of Hydra's refuses by name what NVFP4 cannot do,
and writes down what follows from the keys: what vLLM is to serve, and the modules that verl's
processes import. Without it (`hydra.compose`, say) nothing goes wrong in silence: vLLM then serves
BF16, and its worker refuses the packed weights of the first sync.

verl's entry points (`verl.plugins`) would be loaded in every process, and only log their errors.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import ValidationError

from qat_core.options import BLOCK_SIZE
from qat_core.planning.quantization_config import format_of, quantization_config
from qat_core.planning.recipe import REGEX_PREFIX, Recipe
from qat_core.rollout.vllm.switches import (
    EXPERTS_VARIABLE,
    LINEAR_VARIABLE,
    kernel_named_by,
    require_known_variables,
)
from qat_core.verl import compat
from qat_core.verl.engine_arguments import name_kernels, require_arguments
from qat_core.verl.exact_configuration import KEY, complete_exact, require_no_exact_variable
from qat_core.verl.exact_configuration import MODULE as EXACT_MODULE
from qat_core.verl.near_misses import require_read
from qat_core.verl.precedence import require_last_word, said_by_verl
from qat_core.verl.processes import asked_of_plugin, environment_of, require_plugin
from qat_core.verl.rules import (
    ACTOR,
    BF16_RULES,
    ENGINE,
    GPU_RULES,
    MODEL,
    NVFP4_RULES,
    OFF_RULES,
    OWN_KEYS,
    QAT,
    REPLAY_MODE,
    REPLAY_RULES,
    ROLLOUT,
    SERVED,
    SYNC_RULES,
    VLLM,
    W4A16_RULES,
    refusal,
    require,
    require_switches,
    together,
)

KEYS = (
    *("enable", "mode", "group_size", "ignore_patterns", "activation_observer"),
    *("quantization_config_path", *OWN_KEYS),
)
KERNELS_OF = {LINEAR_VARIABLE: "linear layers", EXPERTS_VARIABLE: "experts"}
YAML_KEYS = {"ignore": "ignore_patterns"}  # of Recipe's fields, where they differ
# what Recipe never quantizes, whatever a user's patterns say
# vLLM's names, as no model is there to ask; where they fall short, the first sync is refused
ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
ROLE_PATTERNS = {"role:attention": "re:.*(attn|attention).*"}
NEVER_QUANTIZED = ("lm_head", rf"re:(.*\.)?({'|'.join(ROUTER_NAMES)})$")


class CompleteConfiguration(Callback):  # type: ignore[misc]
    """Named by the groups of `qat_core/verl/config/nvfp4` below `hydra.callbacks`."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Says in a line what will run, or ends the program with one for each refusal."""
        try:
            together(
                lambda: require_syncs(config.hydra.job.name),
                lambda: require_read(config),
                lambda: require_last_word(config.hydra),
                lambda: print(complete(config), flush=True),
            )
        except ValueError as error:
            sys.exit(refusal(error))
        except Exception as error:  # Hydra would turn it into a warning, and start the run
            sys.exit(f"error: +nvfp4: {type(error).__name__}: {error}")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Hydra composes the configurations of its jobs later, where they cannot be completed."""
        sys.exit("error: --multirun: not supported with +nvfp4; start one run at a time")


def require_syncs(program: str) -> None:
    """ValueError for a program of verl's that samples without ever bringing weights to vLLM."""
    if program == "main_generation_server":
        raise ValueError(f"{program}: never syncs weights; export the checkpoint, and serve that")


def complete(config: DictConfig) -> str:
    """Checks a composed configuration and fills in what its NVFP4 keys imply, in place.

    Returns:
        A line that says what will run.

    Raises:
        ValueError: with a line for each key that asks for what is not supported, variable of the
            environment that is not known, and reason why the actor's model cannot be synced; or for
            verl's or vLLM's version.
    """
    qat = OmegaConf.select(config, QAT)
    is_off = str(OmegaConf.select(config, f"{QAT}._target_")).startswith("verl.")
    is_bf16 = is_off or not OmegaConf.select(config, f"{QAT}.enable")
    rules = [*SYNC_RULES, *(OFF_RULES if is_off else W4A16_RULES)]
    rules += BF16_RULES if is_bf16 else NVFP4_RULES
    is_on_cpu = OmegaConf.select(config, "trainer.device") == "cpu"
    if not is_on_cpu:
        rules += GPU_RULES
    is_exact = OmegaConf.select(config, KEY)
    if _asks_for_routes(config):
        _require_worker(config, "+routing_replay=r3")
        rules += REPLAY_RULES
    if is_exact:
        _require_worker(config, "+exact=on")
    said: list[str] = []
    environment = environment_of(config)
    asked = asked_of_plugin(
        environment,
        is_exact=bool(is_exact),
        is_packed_on_cpu=is_on_cpu and not is_bf16,
        returns_routes_on_cpu=is_on_cpu and _asks_for_routes(config),
    )

    def describe() -> None:
        if _is_fsdp(config):  # else refused by a rule, and without these keys
            recipe = None if is_bf16 else _serve(config, qat)
            said.append(_what_runs(config, recipe, environment))

    together(
        lambda: compat.require_supported(environment),
        lambda: require_known_variables(environment),
        lambda: require_switches(qat),
        lambda: require(config, rules),
        lambda: _require_known_keys(config),
        lambda: require_arguments(config),
        lambda: (
            complete_exact(config, environment)
            if is_exact
            else require_no_exact_variable(environment)
        ),
        lambda: require_plugin(config, asked, environment),
        describe,
    )
    if is_exact:
        _add_module(config, f"{MODEL}.external_lib", EXACT_MODULE)
    _add_module(config, f"{MODEL}.external_lib")
    _add_module(config, f"{ROLLOUT}.checkpoint_engine.custom_backend_module")
    return said[0]


def _require_worker(config: DictConfig, given: str) -> None:
    if OmegaConf.select(config, f"{VLLM}.worker_extension_cls") is None:
        raise ValueError(
            f"{given}: give +nvfp4@_global_=w4a16 too, or +nvfp4@_global_=off for BF16"
        )


def _serve(config: DictConfig, qat: Any) -> Recipe:
    """The recipe, which vLLM then serves."""
    patterns = ignore_patterns(qat.ignore_patterns, qat.quantization_config_path)
    recipe = to_recipe(qat, patterns)
    served = quantization_config("compressed-tensors", engine_patterns(recipe))
    if OmegaConf.select(config, SERVED) not in (None, served):
        raise ValueError(f"{SERVED}: follows from {QAT}; remove the key")
    with open_dict(config):
        OmegaConf.update(config, f"{QAT}.ignore_patterns", list(patterns))
        OmegaConf.update(config, f"{VLLM}.quantization", "compressed-tensors", force_add=True)
        OmegaConf.update(config, SERVED, served, force_add=True)
    return recipe


def _what_runs(config: DictConfig, recipe: Recipe | None, environment: Mapping[str, str]) -> str:
    from qat_core.verl.actor_model import describe_served  # torch, which others here need not load

    served = describe_served(config, recipe, environment)
    is_on_gpu = OmegaConf.select(config, "trainer.device") != "cpu"
    name_kernels(config, served.kernels if is_on_gpu else {})
    is_exact = OmegaConf.select(config, KEY)
    if recipe is None:
        said = "qat_core: BF16 in training and rollouts, synced through this project's worker"
        return f"{said}; kernels: exact" if is_exact else said
    trained = "NVFP4" if OmegaConf.select(config, f"{QAT}.train") else "BF16"
    kernels = ", ".join(
        f"{what} {kernel_named_by(it, environment)}" for it, what in KERNELS_OF.items()
    )
    if not is_on_gpu:
        kernels = "unpacked to BF16, on a CPU"
    elif is_exact:
        kernels = "exact"
    return (
        f"qat_core: rollouts in NVFP4 ({recipe.mode}), trained in {trained}; scale_policy "
        f"{recipe.scale_policy}, block_scale_method {recipe.block_scale_method}; ignored: "
        f"{', '.join(recipe.ignore) or 'nothing'}; packed: {served.packed}; kernels: {kernels}"
    )


def _require_known_keys(config: DictConfig) -> None:
    """ValueError for keys of QAT that verl's workers would refuse later, or that nothing reads."""
    given = OmegaConf.select(config, QAT) or {}
    refused = [
        f"{QAT}.{key}: no such key; known are {', '.join(KEYS)}"
        for key in given
        if key not in ("_target_", *KEYS)
    ]
    sections = {ACTOR: said_by_verl("actor/actor")}
    if not OmegaConf.is_interpolation(config.actor_rollout_ref.rollout, "qat"):  # of QAT
        sections[ROLLOUT] = {"qat.enable": OmegaConf.select(config, f"{ROLLOUT}.qat.enable")}
    for (section, defaults), key in product(sections.items(), KEYS):
        value = OmegaConf.select(config, f"{section}.qat.{key}")
        if value != defaults.get(f"qat.{key}"):
            refused.append(f"{section}.qat.{key}: {value}: verl does not read it; set {QAT}.{key}")
    if refused:
        raise ValueError("\n".join(refused))


def _asks_for_routes(config: DictConfig) -> bool:
    """Whether the actor is to replay routes, or the rollouts to return some, alone in vain."""
    if not _is_fsdp(config):
        return False  # verl's own
    mode = OmegaConf.select(config, REPLAY_MODE) or "disabled"
    returned = OmegaConf.select(config, f"{ROLLOUT}.enable_rollout_routing_replay")
    # verl also counts how often experts are used with them
    counted = OmegaConf.select(config, f"{ROLLOUT}.moe_load_balance_metrics_interval")
    return mode != "disabled" or bool(returned and not counted)


def _is_fsdp(config: DictConfig) -> bool:
    return "FSDP" in str(OmegaConf.select(config, f"{ACTOR}._target_"))


def to_recipe(qat: Any, patterns: Iterable[str]) -> Recipe:
    """The recipe of the settings below `fsdp_config.qat`.

    Raises:
        ValueError: with a line for each setting that is not supported.
    """
    refused = []
    if qat.group_size != BLOCK_SIZE:
        refused.append(f"{QAT}.group_size: {qat.group_size}: NVFP4 has blocks of {BLOCK_SIZE}")
    if qat.mode != "w4a16":
        refused.append(
            f"{QAT}.mode: {qat.mode}: 4-bit activations are not supported, and experimental in "
            "verl's own QAT; use w4a16"
        )
    try:
        recipe = Recipe(
            scale_policy=qat.scale_policy,
            block_scale_method=qat.block_scale_method,
            ignore=tuple(patterns),
        )
    except ValidationError as error:
        for each in error.errors():
            key = YAML_KEYS.get(str(each["loc"][0]), str(each["loc"][0]))
            refused.append(f"{QAT}.{key}: {each['input']}: {each['msg']}")
    if refused:
        raise ValueError("\n".join(refused))
    return recipe


def ignore_patterns(listed: Any, json_path: Any) -> tuple[str, ...]:
    """What stays in BF16: the key's patterns, else those of verl's quantization JSON.

    As in verl, the JSON's own `ignore` counts only where the key is empty.

    Raises:
        ValueError: no list, or the file cannot be read or describes another quantization.
    """
    if isinstance(listed, str) or not isinstance(listed, Sequence | None):
        raise ValueError(f"{QAT}.ignore_patterns: {listed}: give a list, such as [lm_head]")
    if json_path is None:
        return tuple(listed or ())
    declared = patterns_of(json_path)  # checked where they do not count, too
    return tuple(listed or declared)


def engine_patterns(recipe: Recipe) -> list[str]:
    """A recipe's patterns in vLLM's grammar, so that both leave the same modules in BF16.

    To vLLM a pattern without `re:` is a module's whole name; here, as in verl, a part of it.
    """
    known = [ROLE_PATTERNS.get(p, p) for p in recipe.ignore]
    own = [p if p.startswith(REGEX_PREFIX) else f"re:.*{re.escape(p)}" for p in known]
    return [*NEVER_QUANTIZED, *(p for p in own if p not in NEVER_QUANTIZED)]


def _add_module(config: DictConfig, key: str, added: str = ENGINE) -> None:
    """The user's own module stays, after this project's."""
    given = OmegaConf.select(config, key)
    modules = [given] if isinstance(given, str) else list(given or [])
    with open_dict(config):
        others = [module for module in modules if module != added]
        OmegaConf.update(config, key, [added, *others] if others else added, force_add=True)


def patterns_of(path: Any) -> list[str]:
    """What the file leaves in BF16; ValueError if it is not readable, or not NVFP4 W4A16."""
    where = f"{QAT}.quantization_config_path: {path}"
    if not isinstance(path, str):
        raise ValueError(f"{where}: give a path, or null")
    try:
        declared = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:  # a ValueError of JSON or of the path
        raise ValueError(f"{where}: {error}; give verl's quantization JSON, or null") from None
    kind, ignored = format_of(declared, where)
    if kind != "compressed-tensors":
        raise ValueError(f"{where}: quant_method: {kind}: give compressed-tensors")
    return ignored
