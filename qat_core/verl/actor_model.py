"""The actor's model as its folder describes it, looked at before Ray starts.

It is built on the meta device, by the class that verl's workers will build, and its files are asked
for their names, so that what workers, or the first sync, would refuse is refused at once.
"""

from collections import Counter
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from transformers import AutoConfig
from transformers.utils import cached_file

from qat_core.checkpoint.load import require_whole
from qat_core.checkpoint.shards import has_weights
from qat_core.planning.plan import QuantPlan, bf16_plan, refusals, unchecked_plan
from qat_core.planning.recipe import Recipe
from qat_core.planning.structure import expert_blocks
from qat_core.rollout.vllm.compat import require_reloadable
from qat_core.verl.rules import MODEL, QAT, REPLAY_MODE
from qat_core.weights.hub_names import HubNames

QUIETLY: Any = {"_raise_exceptions_for_missing_entries": False}
SHOWN = 5  # problems of one model, which often has the same in each layer


def describe_packed(config: DictConfig, recipe: Recipe | None) -> str:
    """Which of the actor's weights a recipe packs; of what cannot be read on this machine, that.

    Raises:
        ValueError: with a line for each reason why the model cannot be synced, or not with this
            recipe, or cannot replay routes.
    """
    given: Any = OmegaConf.to_container(config.actor_rollout_ref.model, resolve=True)
    path, is_trusted = given.get("path"), bool(given.get("trust_remote_code"))
    try:
        model_config = _model_config(given, is_trusted)
    except Exception as error:  # whatever is wrong there, verl's workers will say
        return f"known once workers have read {path} ({type(error).__name__})"
    try:
        require_reloadable((model_config.architectures or [""])[0])
        model = _meta_model(model_config, is_trusted)
    except ValueError as error:
        raise ValueError(f"{MODEL}.path: {path}: {error}") from None
    found = []
    if OmegaConf.select(config, REPLAY_MODE) == "R3" and not expert_blocks(model):
        found.append(f"{REPLAY_MODE}: R3: the model has no experts; remove the key")
    if recipe is None:
        unchecked = bf16_plan(model)
    else:
        unchecked = unchecked_plan(model, recipe)
        found += [_line(path, each) for each in refusals(model, recipe, unchecked)[:SHOWN]]
    try:
        HubNames(model)
    except ValueError as error:
        found.append(f"{MODEL}.path: {path}: {error}")
    try:
        _require_files(model, str(path))
    except ValueError as error:
        found.append(f"{MODEL}.path: {error}")
    if found:
        raise ValueError("\n".join(found))
    return _packed(unchecked)


def _require_files(model: nn.Module, path: str) -> None:
    """ValueError unless the files that are on this machine hold just the model's weights."""
    if type(model).__module__.startswith("transformers."):
        config = cached_file(path, "config.json", local_files_only=True, **QUIETLY)
        if config is not None and has_weights(Path(config).parent):
            require_whole(Path(config).parent)


def _line(path: str, problem: str) -> str:
    kind, _, rest = problem.partition(": ")
    if kind == "ignore":
        return f"{QAT}.ignore_patterns: {rest}"
    return f"{MODEL}.path: {path}: {problem}"


def _packed(checked: QuantPlan) -> str:
    """As `252 of 399 tensors, 85 % of the weights (36x q_proj, ...)`."""
    sizes = {entry.name: prod(entry.shape) for entry in checked.entries}
    share = sum(sizes[name] for name in checked.quantized) / sum(sizes.values())
    leaves = Counter(n.removesuffix(".weight").rpartition(".")[2] for n in checked.quantized)
    kinds = ", ".join(f"{count}x {leaf}" for leaf, count in leaves.items())
    return f"{len(checked.quantized)} of {len(sizes)} tensors, {share:.0%} of the weights ({kinds})"


def _model_config(given: dict[str, Any], is_trusted: bool) -> Any:
    """transformers' configuration with the command's changes, as verl's `HFModelConfig` has it."""
    from verl.utils.model import update_model_config

    path = given.get("hf_config_path") or given["path"]
    read = partial(AutoConfig.from_pretrained, path, trust_remote_code=is_trusted)
    try:
        found = read(local_files_only=True)  # without a network, a name of the hub waits for 24 s
    except OSError:
        found = read()
    changes = given.get("override_config") or {}
    changes = changes.get("model_config", changes)
    update_model_config(found, {k: v for k, v in changes.items() if k != "attn_implementation"})
    return found


def _meta_model(config: Any, is_trusted: bool) -> nn.Module:
    from verl.utils.model import get_hf_auto_model_class

    auto_class: Any = get_hf_auto_model_class(config)
    with torch.device("meta"):
        model: nn.Module = auto_class.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=is_trusted
        )
    return model
