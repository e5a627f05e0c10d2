"""The actor's model as its folder describes it, looked at before Ray starts.

It is built on the meta device, by the class that verl's workers will build, and its files are asked
for their names, so that what workers, or the first sync, would refuse is refused at once.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import cached_file

from qat_core.checkpoint.load import require_whole
from qat_core.checkpoint.shards import has_weights
from qat_core.planning.plan import QuantPlan, bf16_plan, refusals, unchecked_plan
from qat_core.planning.recipe import Recipe
from qat_core.planning.structure import expert_blocks
from qat_core.rollout.vllm.compat import require_reloadable
from qat_core.rollout.vllm.kernel_choice import settings_by_name
from qat_core.verl.rules import MODEL, QAT, REPLAY_MODE, VLLM
from qat_core.weights.hub_names import HubNames

QUIETLY: Any = {"_raise_exceptions_for_missing_entries": False}
# Of a configuration: what trainer or engine reads alone, and what SERVED says.
ONE_SIDED = re.compile(
    r"attn_implementation|(torch_)?dtype|use_cache|output_\w+|\w*drop(out)?|\w+_token_id"
    r"|router_aux_loss_coef|max_position_embeddings|architectures|quantization_config"
)
SHOWN = 5  # problems of one model, which often has the same in each layer


class Served(NamedTuple):
    """What vLLM is to serve of the actor's model."""

    packed: str  # which weights, in words
    kernels: Mapping[str, str]  # settings of vLLM that name a GPU's


def describe_served(
    config: DictConfig, recipe: Recipe | None, environment: Mapping[str, str]
) -> Served:
    """What a recipe packs; of a model that cannot be read on this machine, that, and no kernels.

    Args:
        config: of verl's command.
        recipe: what is packed; None serves BF16.
        environment: of vLLM's processes.

    Raises:
        ValueError: with a line for each reason why the model cannot be synced, or not with this
            recipe, or cannot replay routes.
    """
    given = _given(config)
    path, is_trusted = given.get("path"), bool(given.get("trust_remote_code"))
    trained = _trained(given)
    try:
        read, model_config = read_configs(config)
    except Exception as error:  # whatever is wrong there, verl's workers will say
        return Served(f"known once workers have read {path} ({type(error).__name__})", {})
    try:
        if not model_config.architectures:
            raise ValueError("config.json: architectures: missing, verl chooses a class by it")
        require_reloadable(model_config.architectures[0])
        model = _meta_model(model_config, is_trusted)
    except ValueError as error:
        raise ValueError(f"{MODEL}.path: {path}: {error}") from None
    served: Any = OmegaConf.select(config, f"{VLLM}.hf_overrides")
    served = OmegaConf.to_container(served) if isinstance(served, DictConfig) else {}
    is_closed = not (is_trusted or given.get("external_lib"))  # else a user's code may read more
    found = list(_differing(read, trained, served, is_closed))
    if OmegaConf.select(config, REPLAY_MODE) == "R3" and not expert_blocks(model):
        found.append(f"{REPLAY_MODE}: R3: the model has no experts; remove the key")
    if recipe is None:
        unchecked = bf16_plan(model)
    else:
        unchecked = unchecked_plan(model, recipe)
        found += [_line(path, each) for each in refusals(model, recipe, unchecked)[:SHOWN]]
    kernels = {}
    try:
        names = HubNames(model)
        experts = [it.name for it in unchecked.entries if names.expert_prefix(it.name) is not None]
        kernels = settings_by_name(experts, unchecked.quantized, environment)
    except ValueError as error:
        found.append(f"{MODEL}.path: {path}: {error}")
    try:
        _require_files(model, str(path))
    except ValueError as error:
        found.append(f"{MODEL}.path: {error}")
    if found:
        raise ValueError("\n".join(found))
    return Served(_packed(unchecked), kernels)


def read_configs(config: DictConfig) -> tuple[Any, Any]:
    """The configuration of the actor's model as its file has it, and as verl trains it."""
    given = _given(config)
    is_trusted = bool(given.get("trust_remote_code"))
    read = _read_config(given.get("path"), is_trusted)
    model_config = deepcopy(read)
    _update(model_config, _trained(given))
    return read, model_config


def _given(config: DictConfig) -> Any:
    return OmegaConf.to_container(config.actor_rollout_ref.model, resolve=True)


def _trained(given: Mapping[str, Any]) -> Any:
    """What verl's keys change of the model's configuration."""
    changes = given.get("override_config") or {}
    return changes.get("model_config", changes)


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


def _read_config(path: str, is_trusted: bool) -> Any:
    read = partial(AutoConfig.from_pretrained, path, trust_remote_code=is_trusted)
    try:
        return read(local_files_only=True)  # without a network, a name of the hub waits for 24 s
    except OSError:
        return read()


def _update(model_config: Any, changes: Mapping[str, Any]) -> None:
    """As verl's `HFModelConfig` does."""
    from verl.utils.model import update_model_config

    kept = {key: value for key, value in changes.items() if key != "attn_implementation"}
    update_model_config(model_config, kept)


def _differing(
    read: Any,
    trained: Mapping[str, Any],
    served: Mapping[str, Any],
    is_closed: bool,
    prefix: str = "",
) -> Iterator[str]:
    """A line for each key of the configuration by which trainer and vLLM compute differently.

    Also for those that nothing reads, as `rope_theta` where transformers has `rope_parameters`.
    """
    for key in dict.fromkeys((*trained, *served)):
        own, name = getattr(read, key, None), f"{MODEL}.override_config.{prefix}{key}"
        ours, theirs = trained.get(key, own), served.get(key, own)
        if isinstance(own, PreTrainedConfig):
            parts = trained.get(key, {}), served.get(key, {})
            yield from _differing(own, *parts, is_closed, f"{prefix}{key}.")
        elif ours == theirs or ONE_SIDED.fullmatch(key):
            continue
        elif hasattr(read, key) or key in served:  # vLLM knows older names, too
            yield (
                f"{name}: {ours} in the trainer, but {theirs} in vLLM: give {VLLM}.hf_overrides."
                f"{prefix}{key} the same value, or change config.json"
            )
        elif is_closed:
            yield f"{name}: {ours}: {type(read).__name__} has no such key; correct or remove it"


def _meta_model(config: Any, is_trusted: bool) -> nn.Module:
    from verl.utils.model import get_hf_auto_model_class

    auto_class: Any = get_hf_auto_model_class(config)
    with torch.device("meta"):
        model: nn.Module = auto_class.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=is_trusted
        )
    return model
