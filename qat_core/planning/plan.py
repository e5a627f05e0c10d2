"""Plan of a quantization: which parameter is quantized, with which scale group, and why not.

Persistent buffers have an entry too: they are part of what an engine needs, and never quantized.

Looks at names, classes and shapes only, so that it works on meta-device, sharded and prepared
models alike. A plan is checked: what an engine could not serve is refused here.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from qat_core.options import BLOCK_SIZE
from qat_core.planning.groups import fused_siblings, group_name
from qat_core.planning.recipe import (
    ATTENTION_PATTERNS,
    Recipe,
    goes_with_any_model,
    matches,
    require_recipe,
)
from qat_core.planning.structure import (
    embedding_weights,
    expert_holders,
    expert_owner,
    head_names,
    roles,
    router_names,
)


@dataclass(frozen=True)
class Entry:
    """One parameter or persistent buffer.

    Attributes:
        name: as the trainer's model has it.
        shape: of the whole tensor, sharded or not.
        quantized: whether it is packed; else it travels and is stored in `dtype`.
        group: names the weights it shares a global scale with.
        reason: for people.
        dtype: PyTorch's name of it, "bfloat16" but for what transformers keeps in FP32 next to
            BF16 weights, and for buffers of integers.
        fused: names the weights that engines run as one layer, in one precision; None if alone.
    """

    name: str
    shape: tuple[int, ...]
    quantized: bool
    group: str | None
    reason: str
    dtype: str = "bfloat16"
    fused: str | None = None


@dataclass(frozen=True)
class QuantPlan:
    """What a recipe does to every parameter of a model."""

    entries: tuple[Entry, ...]

    @cached_property
    def quantized(self) -> tuple[str, ...]:
        """Names of the quantized parameters."""
        return tuple(entry.name for entry in self.entries if entry.quantized)

    @cached_property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Parameters that share a global scale; every quantized one is in exactly one group."""
        members = defaultdict(list)
        for entry in self.entries:
            if entry.group is not None:
                members[entry.group].append(entry.name)
        return {group: tuple(names) for group, names in members.items()}


def plan(model: nn.Module, recipe: Recipe) -> QuantPlan:
    """What `recipe` quantizes in `model`.

    Raises:
        ValueError: the recipe quantizes nothing, an input size is not a multiple of 16, a fused
            group has members of different input size, or of weights that engines run as one layer
            (q/k/v, gate/up, all experts of a block) only some are ignored; or an ignore pattern
            matches nothing; or `recipe` is none.
    """
    checked = unchecked_plan(model, recipe)
    found = refusals(model, recipe, checked)
    if found:
        more = f" (and {len(found) - 3} more problems)" if len(found) > 3 else ""
        raise ValueError("; ".join(found[:3]) + more)
    return checked


def bf16_plan(model: nn.Module) -> QuantPlan:
    """The plan that quantizes nothing."""
    return unchecked_plan(model, Recipe(ignore=("re:.*",)))


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside of torch.compile's wrapper, which puts a prefix before all names."""
    return getattr(model, "_orig_mod", model)


def unchecked_plan(model: nn.Module, recipe: Recipe) -> QuantPlan:
    """An entry for each parameter and persistent buffer; a tied one has the first of its names."""
    require_recipe(recipe)
    model = uncompiled(model)
    modules = dict(model.named_modules())
    linears = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    reasons = dict.fromkeys(router_names(model), "router gate")
    reasons |= dict.fromkeys(head_names(model), "embedding or output head")
    embeddings, dtypes = embedding_weights(model), _stored_dtypes(model)
    holders = expert_holders(modules)
    entries = []
    for name, tensor in state_tensors(model):
        module_name, _, leaf = name.rpartition(".")
        reason = _not_a_weight(modules[module_name], leaf, tensor) or reasons.get(module_name, "")
        if any(tensor is embedding for embedding in embeddings):
            reason = "embedding or output head"
        ignoring = (p for p in recipe.ignore if _covers(p, name, modules))
        reason = reason or next((f"ignored by {pattern!r}" for pattern in ignoring), "")
        group = None
        if not reason:
            group = name if tensor.ndim == 3 else group_name(module_name, linears)
        kept = reason or ("expert weights" if tensor.ndim == 3 else "linear weight")
        shape, dtype = tuple(tensor.shape), dtypes.get(name, "bfloat16")
        fused = _fused(name, tensor, holders)
        entries.append(Entry(name, shape, group is not None, group, kept, dtype, fused))
    return QuantPlan(tuple(entries))


def refusals(model: nn.Module, recipe: Recipe, unchecked: QuantPlan) -> list[str]:
    """Why `plan` refuses a recipe for a model, empty if it does not."""
    return [*_void_patterns(model, recipe), *_problems(unchecked)]


def _void_patterns(model: nn.Module, recipe: Recipe) -> list[str]:
    """A line for each ignore pattern that matches nothing in the model, as a misspelt one does.

    Of the two for attention one is enough, and what is never quantized need not be there.
    """
    model = uncompiled(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {name for name, _ in state_tensors(model)}
    names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}  # tied ones too
    void = [p for p in recipe.ignore if not any(_covers(p, name, modules) for name in names)]
    if not set(ATTENTION_PATTERNS) & set(recipe.ignore) <= set(void):
        void = [p for p in void if p not in ATTENTION_PATTERNS]
    return [
        f"ignore: {pattern!r} matches nothing in {type(model).__name__}: correct it, or leave it "
        "out; a pattern is a part of a name, or re: and a regex"
        for pattern in void
        if not goes_with_any_model(pattern)
    ]


def _problems(unchecked: QuantPlan) -> Iterator[str]:
    """Why the plan cannot be trained and served, nothing if it can."""
    by_name = {entry.name: entry for entry in unchecked.entries}
    for name in unchecked.quantized:
        size = by_name[name].shape[-1]
        if size % BLOCK_SIZE:
            yield (
                f"{name}: input size {size} is not a multiple of {BLOCK_SIZE}: add it to the "
                "recipe's ignore"
            )
    for group, names in unchecked.groups.items():
        sizes = {name: by_name[name].shape[-1] for name in names}
        if len(set(sizes.values())) > 1:
            differ = "members differ in input size, so no engine can fuse them"
            yield f"group {group}: {differ}: {sizes}"
    layers = defaultdict(list)
    for entry in unchecked.entries:
        layers[entry.fused or entry.name].append(entry)
    for layer in layers.values():
        packed = [entry.name for entry in layer if entry.quantized]
        left_out = [entry for entry in layer if not entry.quantized]
        if packed and left_out:
            yield (
                f"{left_out[0].name} is left out ({left_out[0].reason}) but "
                f"{', '.join(packed[:3])} not: engines run them as one layer, so ignore all or none"
            )
    if not unchecked.quantized:
        yield "the recipe quantizes nothing: see qat_core.explain(model, recipe)"


def _not_a_weight(module: nn.Module, leaf: str, tensor: Tensor) -> str:
    """Why this tensor is never quantized, "" if it can be."""
    if not isinstance(tensor, nn.Parameter):
        return "buffer"
    if tensor.ndim == 3 and hasattr(module, "is_transposed"):
        transposed = "experts stored (input, output): blocks run along the last dimension"
        return transposed if module.is_transposed else ""
    is_weight = isinstance(module, nn.Linear) and leaf == "weight"
    return "" if is_weight else "neither a linear nor an expert weight"


def _covers(pattern: str, name: str, modules: dict[str, nn.Module]) -> bool:
    module_name = name.rpartition(".")[0]
    return matches(pattern, module_name, roles(name, modules)) or matches(pattern, name)


def state_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, module by module, each once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        tensors = dict(module._parameters)
        tensors |= {
            n: t for n, t in module._buffers.items() if n not in module._non_persistent_buffers_set
        }
        for leaf, tensor in tensors.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{leaf}" if prefix else leaf, tensor


def meta_copy_of(model: Any) -> nn.Module:
    """What transformers makes of the configuration of its model: on the meta device, in BF16."""
    config = copy.deepcopy(model.config)
    config.dtype = torch.bfloat16  # `save_pretrained` leaves its name there; Apertus needs a dtype
    with torch.device("meta"):
        whole: nn.Module = type(model)._from_config(config, dtype=torch.bfloat16)
    return whole


def _stored_dtypes(model: nn.Module) -> dict[str, str]:
    """What transformers' model has each tensor in when it is loaded in BF16, of others than BF16.

    Asked of a copy without memory: the trainer's own may be in FP32 throughout.
    """
    if not hasattr(model, "_from_config"):  # not of transformers
        return {}
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    patterns = [each.replace("*", ".*") for each in strict]  # searched for, as the loader does
    dtypes = {}
    for name, tensor in state_tensors(meta_copy_of(model)):
        kept = tensor.is_floating_point() and any(re.search(each, name) for each in patterns)
        dtype = torch.float32 if kept else tensor.dtype
        if dtype != torch.bfloat16:
            dtypes[name] = str(dtype).removeprefix("torch.")
    return dtypes


def _fused(name: str, tensor: Tensor, holders: set[str]) -> str | None:
    """The layer of an engine's that a weight is a part of, next to others."""
    module_name, _, leaf = name.rpartition(".")
    if tensor.ndim == 3 or (tensor.ndim == 2 and leaf == "weight"):
        block = expert_owner(name, holders)
        if block is not None:
            return f"{block}: experts"
    siblings = fused_siblings(module_name)
    return "+".join(siblings) if leaf == "weight" and len(siblings) > 1 else None
