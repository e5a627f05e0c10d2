"""Plan of a quantization: which parameter is quantized, with which scale group, and why not.

Looks at names, classes and shapes only, so that it works on meta-device, sharded and prepared
models alike. A plan is checked: what an engine could not serve is refused here.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from qat_core.groups import fused_siblings, group_name
from qat_core.options import BLOCK_SIZE
from qat_core.recipe import Recipe, matches

ROUTER_NAMES = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True)
class Entry:
    """One parameter: `group` names the weights it shares a global scale with."""

    name: str
    shape: tuple[int, ...]
    quantized: bool
    group: str | None
    reason: str
    dtype: str = "bfloat16"


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
            group has members of different input size, or only some of its members are ignored.
    """
    checked = unchecked_plan(model, recipe)
    found = problems(checked)
    if found:
        more = f" (and {len(found) - 3} more problems)" if len(found) > 3 else ""
        raise ValueError("; ".join(found[:3]) + more)
    return checked


def bf16_plan(model: nn.Module) -> QuantPlan:
    """The plan that quantizes nothing."""
    return unchecked_plan(model, Recipe(ignore=("re:.*",)))


def unchecked_plan(model: nn.Module, recipe: Recipe) -> QuantPlan:
    """An entry for each parameter; a tied one has the first of its names."""
    modules = dict(model.named_modules())
    linears = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
    heads = _embeddings(model)
    entries = []
    for name, parameter in model.named_parameters():
        module_name, _, leaf = name.rpartition(".")
        reason = _not_a_weight(modules[module_name], module_name, leaf, parameter)
        if any(parameter is head for head in heads):
            reason = "embedding or output head"
        reason = reason or _ignored(recipe, module_name, name)
        group = None
        if not reason:
            group = name if parameter.ndim == 3 else group_name(module_name, linears)
        kept = reason or ("expert weights" if parameter.ndim == 3 else "linear weight")
        entries.append(Entry(name, tuple(parameter.shape), group is not None, group, kept))
    return QuantPlan(tuple(entries))


def unmatched_patterns(planned: QuantPlan, recipe: Recipe) -> list[str]:
    """The recipe's ignore patterns that match no parameter of the planned model."""
    names = [entry.name for entry in planned.entries]
    return [
        pattern
        for pattern in recipe.ignore
        if not any(matches(pattern, name) or matches(pattern, _module(name)) for name in names)
    ]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def problems(unchecked: QuantPlan) -> list[str]:
    """Why the plan cannot be trained and served, empty if it can."""
    by_name = {entry.name: entry for entry in unchecked.entries}
    found = [_odd_input_size(by_name[name]) for name in unchecked.quantized]
    found += [
        _input_sizes_differ(group, [by_name[n] for n in names])
        for group, names in unchecked.groups.items()
    ]
    found += [_partly_ignored(entry, by_name) for entry in unchecked.entries]
    if not unchecked.quantized:
        found.append("the recipe quantizes nothing: see qat_core.explain(model, recipe)")
    return [problem for problem in found if problem]


def _not_a_weight(module: nn.Module, module_name: str, leaf: str, parameter: Tensor) -> str:
    """Why this parameter is never quantized, "" if it can be."""
    if parameter.ndim == 3 and hasattr(module, "is_transposed"):
        transposed = "experts stored (input, output): blocks run along the last dimension"
        return transposed if module.is_transposed else ""
    if not isinstance(module, nn.Linear) or leaf != "weight":
        return "neither a linear nor an expert weight"
    module_leaf = module_name.rpartition(".")[2]
    if module_leaf == "lm_head":
        return "embedding or output head"
    return "router gate" if module_leaf in ROUTER_NAMES else ""


def _embeddings(model: nn.Module) -> list[Tensor | None]:
    getters = ("get_input_embeddings", "get_output_embeddings")
    modules = [getattr(model, getter)() for getter in getters if hasattr(model, getter)]
    return [getattr(module, "weight", None) for module in modules]


def _ignored(recipe: Recipe, module_name: str, name: str) -> str:
    for pattern in recipe.ignore:
        if matches(pattern, module_name) or matches(pattern, name):
            return f"ignored by {pattern!r}"
    return ""


def _odd_input_size(entry: Entry) -> str:
    if entry.shape[-1] % BLOCK_SIZE == 0:
        return ""
    return (
        f"{entry.name}: input size {entry.shape[-1]} is not a multiple of {BLOCK_SIZE}: "
        "add it to the recipe's ignore"
    )


def _input_sizes_differ(group: str, members: list[Entry]) -> str:
    sizes = {member.name: member.shape[-1] for member in members}
    if len(set(sizes.values())) == 1:
        return ""
    return f"group {group}: members differ in input size, so no engine can fuse them: {sizes}"


def _partly_ignored(entry: Entry, by_name: dict[str, Entry]) -> str:
    if entry.quantized or not entry.name.endswith(".weight"):
        return ""
    siblings = [f"{s}.weight" for s in fused_siblings(entry.name.removesuffix(".weight"))]
    quantized = [s for s in siblings if s in by_name and by_name[s].quantized]
    if not quantized:
        return ""
    return (
        f"{entry.name} is left out ({entry.reason}) but {', '.join(quantized)} not: engines run "
        "them as one matrix, so ignore all or none"
    )
