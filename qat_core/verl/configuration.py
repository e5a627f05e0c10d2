"""What `+nvfp4=...` means, worked out when Hydra has composed a command, before Ray starts.

The YAML groups hold the user's keys; this callback of Hydra's refuses by name what NVFP4 cannot do,
and writes down what follows from the keys: what vLLM is to serve, and the modules that verl's
processes import. Without it (`hydra.compose`, say) nothing goes wrong in silence: vLLM then serves
BF16, and its worker refuses the packed weights of the first sync.

verl's entry points (`verl.plugins`) are not used for this: verl loads them in every process of
every run, which takes about three seconds of a core each, and only logs their errors, at DEBUG
level.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import ValidationError

from qat_core.options import BLOCK_SIZE
from qat_core.quantization_config import quantization_config
from qat_core.recipe import REGEX_PREFIX, Recipe
from qat_core.verl import compat
from qat_core.verl.engine_arguments import require_arguments
from qat_core.verl.exact_configuration import KEY, complete_exact, require_precision
from qat_core.verl.exact_configuration import MODULE as EXACT_MODULE
from qat_core.verl.precedence import require_last_word
from qat_core.verl.quantization_json import patterns_of
from qat_core.verl.rules import (
    ACTOR,
    BF16_RULES,
    ENGINE,
    GPU_RULES,
    MODEL,
    NVFP4_RULES,
    OFF_RULES,
    QAT,
    REPLAY_MODE,
    REPLAY_RULES,
    ROLLOUT,
    SERVED,
    SYNC_RULES,
    VLLM,
    W4A16_RULES,
    require,
    require_switches,
)

YAML_KEYS = {"ignore": "ignore_patterns"}  # of Recipe's fields, where they differ
# what Recipe never quantizes, whatever a user's patterns say
# vLLM's names, as no model is there to ask; where they fall short, the first sync is refused
ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
ROLE_PATTERNS = {"role:attention": "re:.*(attn|attention).*"}
NEVER_QUANTIZED = ("lm_head", rf"re:(.*\.)?({'|'.join(ROUTER_NAMES)})$")


class CompleteConfiguration(Callback):  # type: ignore[misc]
    """Named by the groups of `qat_core/verl/config/nvfp4` below `hydra.callbacks`."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Ends the program with one line where the configuration is refused."""
        try:
            require_syncs(config.hydra.job.name)
            require_last_word(config.hydra)
            complete(config)
        except ValueError as error:
            sys.exit(f"error: {error}")
        except Exception as error:  # Hydra would turn it into a warning, and start the run
            sys.exit(f"error: +nvfp4: {type(error).__name__}: {error}")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Hydra composes the configurations of its jobs later, where they cannot be completed."""
        sys.exit("error: --multirun: not supported with +nvfp4; start one run at a time")


def require_syncs(program: str) -> None:
    """ValueError for a program of verl's that samples without ever bringing weights to vLLM."""
    if program == "main_generation_server":
        raise ValueError(f"{program}: never syncs weights; export the checkpoint, and serve that")


def complete(config: DictConfig) -> None:
    """Checks a composed configuration and fills in what its NVFP4 keys imply, in place.

    Raises:
        ValueError: a key asks for what is not supported, or verl's version is another.
    """
    compat.require_supported()
    qat = OmegaConf.select(config, QAT)
    require_switches(qat)
    is_off = str(OmegaConf.select(config, f"{QAT}._target_")).startswith("verl.")
    if is_off:
        require(config, OFF_RULES)
    if _asks_for_routes(config):
        if OmegaConf.select(config, f"{VLLM}.worker_extension_cls") is None:
            raise ValueError("+routing_replay=r3: give +nvfp4=w4a16 too, or +nvfp4=off for BF16")
        require(config, REPLAY_RULES)
    if OmegaConf.select(config, KEY):
        require_precision(config)
    require(config, SYNC_RULES)
    if OmegaConf.select(config, "trainer.device") != "cpu":
        require(config, GPU_RULES)
    require_arguments(config)
    if OmegaConf.select(config, KEY):
        complete_exact(config)
        _add_module(config, f"{MODEL}.external_lib", EXACT_MODULE)
    _add_module(config, f"{MODEL}.external_lib")
    _add_module(config, f"{ROLLOUT}.checkpoint_engine.custom_backend_module")
    if not is_off:
        require(config, W4A16_RULES)
    if is_off or not qat.enable:
        require(config, BF16_RULES)
        return
    require(config, NVFP4_RULES)
    patterns = ignore_patterns(qat.ignore_patterns, qat.quantization_config_path)
    recipe = to_recipe(qat, patterns)
    served = quantization_config("compressed-tensors", engine_patterns(recipe))
    if OmegaConf.select(config, SERVED) not in (None, served):
        raise ValueError(f"{SERVED}: follows from {QAT}; remove the key")
    with open_dict(config):
        OmegaConf.update(config, f"{QAT}.ignore_patterns", list(patterns))
        OmegaConf.update(config, f"{VLLM}.quantization", "compressed-tensors", force_add=True)
        OmegaConf.update(config, SERVED, served, force_add=True)


def _asks_for_routes(config: DictConfig) -> bool:
    """Whether the actor is to replay routes, or the rollouts to return some, alone in vain."""
    if "FSDP" not in str(OmegaConf.select(config, f"{ACTOR}._target_")):
        return False  # verl's own
    mode = OmegaConf.select(config, REPLAY_MODE) or "disabled"
    returned = OmegaConf.select(config, f"{ROLLOUT}.enable_rollout_routing_replay")
    # verl also counts how often experts are used with them
    counted = OmegaConf.select(config, f"{ROLLOUT}.moe_load_balance_metrics_interval")
    return mode != "disabled" or bool(returned and not counted)


def to_recipe(qat: Any, patterns: Iterable[str]) -> Recipe:
    """The recipe of the settings below `fsdp_config.qat`.

    Raises:
        ValueError: a setting that is not supported, in one line.
    """
    if qat.group_size != BLOCK_SIZE:
        raise ValueError(f"{QAT}.group_size: {qat.group_size}: NVFP4 has blocks of {BLOCK_SIZE}")
    try:
        return Recipe(
            mode=qat.mode,
            scale_policy=qat.scale_policy,
            block_scale_method=qat.block_scale_method,
            ignore=tuple(patterns),
        )
    except ValidationError as error:
        first = error.errors()[0]
        key = YAML_KEYS.get(str(first["loc"][0]), str(first["loc"][0]))
        raise ValueError(f"{QAT}.{key}: {first['input']}: {first['msg']}") from None


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
    own = [p if p.startswith(REGEX_PREFIX) else f"re:.*{_escaped(p)}" for p in known]
    return [*NEVER_QUANTIZED, *(p for p in own if p not in NEVER_QUANTIZED)]


def _escaped(text: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else f"\\{c}" for c in text)


def _add_module(config: DictConfig, key: str, added: str = ENGINE) -> None:
    """The user's own module stays, after this project's."""
    given = OmegaConf.select(config, key)
    modules = [given] if isinstance(given, str) else list(given or [])
    with open_dict(config):
        others = [module for module in modules if module != added]
        OmegaConf.update(config, key, [added, *others] if others else added, force_add=True)
