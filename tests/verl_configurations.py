"""Configurations of verl's with `+nvfp4=w4a16`, as Hydra composes them for a command."""

from contextlib import chdir
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs requirements/engines.txt")

import verl
from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from qat_core.planning.recipe import Recipe
from qat_core.verl.configuration import complete

VERL = Path(verl.__file__).parent
CONFIGS = {
    "ppo": VERL / "trainer/config/ppo_trainer",
    "one-step-off": VERL / "experimental/one_step_off_policy/config/one_step_off_ppo_trainer",
    "fully-async": VERL / "experimental/fully_async_policy/config/fully_async_ppo_trainer",
}
ROLLOUT, QAT = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.fsdp_config.qat"
MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"  # verl has no default
COMMAND = ["+nvfp4=w4a16", f"{ROLLOUT}.name=vllm", MICRO_BATCH]


def composed(*overrides: str, config: Path = CONFIGS["ppo"]) -> DictConfig:
    """As Hydra composes it; what differs in values alone is composed once, as that takes long."""
    values = [override for override in overrides if _is_value(override)]
    groups = [override for override in overrides if override not in values]
    content = deepcopy(composed_groups(config, *groups))
    parsed = OverridesParser.create().parse_overrides(values)
    ConfigLoaderImpl._apply_overrides_to_config(parsed, content)  # Hydra's own last step
    return content


def _is_value(override: str) -> bool:
    """Whether it sets a key of a section; what has no dot may be a group."""
    name = override.partition("=")[0]
    return "." in name and not name.startswith("hydra.")


@cache
def composed_groups(config: Path, *groups: str) -> DictConfig:
    # verl's `file://verl/trainer/config` is relative to the folder of a checkout of verl
    with chdir(VERL.parent), initialize_config_dir(str(config.parent), version_base=None):
        return compose(config.name, overrides=list(groups))


def completed(*overrides: str, config: Path = CONFIGS["ppo"]) -> DictConfig:
    content = composed(*COMMAND, *overrides, config=config)
    complete(content)
    return content


def served(config: DictConfig) -> Any:
    key = f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides.quantization_config"
    found = OmegaConf.select(config, key)
    return None if found is None else OmegaConf.to_container(found)


FULL = Recipe(ignore=("lm_head", "embed_tokens", "re:.*mlp.gate$"))


def started(*overrides: str, config: Path = CONFIGS["ppo"], program: str = "main_ppo") -> Any:
    """The configuration with which a program of verl's would start, as Hydra's callbacks leave it.

    Raises:
        SystemExit: with the line on which the program ends.
    """
    with chdir(VERL.parent), initialize_config_dir(str(config.parent), program, version_base=None):
        content = compose(config.name, overrides=list(overrides), return_hydra_config=True)
        Callbacks(content).on_run_start(config=content)
    return content
