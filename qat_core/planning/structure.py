"""What a linear layer is in its model: output head, router, or part of attention.

Names say little: a router is `gate`, `router.layer`, `gate.wg` or `router.classifier`, a head
`lm_head`, `embed_out`, `score` or `classifier`. Their place in the model and their output size do.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

# At the end, as a JambaAttentionDecoderLayer holds experts. Mamba, gated delta nets and the like
# stand in the place of attention.
ATTENTION_CLASSES = r"(Attention|Attn|Mixer|DeltaNet|ShortConv|RecurrentBlock)\d*$"

Modules = dict[str, nn.Module]


def embedding_weights(model: nn.Module) -> list[Any]:
    """Weights of the input and output embeddings, tied or not; None where there is none."""
    getters = ("get_input_embeddings", "get_output_embeddings")
    known = _with_embeddings(model).values()
    return [getattr(_called(each, getter), "weight", None) for each in known for getter in getters]


def head_names(model: nn.Module) -> set[str]:
    """Linear layers for logits, labels or values: those outside the base model.

    A wrapper, such as one that adds a head for values, is a part of no base model.
    """
    names = _linears(dict(model.named_modules()))
    bases = [_base_name(name, each) for name, each in _with_embeddings(model).items()]
    outside = {n for n in names if bases and not any(_inside(n, base) for base in bases)}
    return outside | ({"lm_head"} & {*names})


def router_names(model: nn.Module) -> set[str]:
    """Linears that choose experts, or weigh a shared one.

    Such a linear stands right in the block that holds the experts, alone there or in a module of
    its own, and has as many outputs as there are experts, or a number that no matrix of the block
    takes as its input.
    """
    modules = dict(model.named_modules())
    holders = expert_holders(modules)
    routers: set[str] = set()
    for block in {_parent(holder) for holder in holders}:
        experts = [h for h in holders if _parent(h) == block]
        counts = {count for h in experts for count in _expert_counts(modules[h])}
        taken = set(_input_sizes(block, modules))
        taken |= {2 * size for size in taken}  # gate and up as one matrix
        for name in _candidates(block, modules, experts):
            num_outputs = modules[name].out_features
            if num_outputs in counts or num_outputs not in taken:
                routers.add(name)
    return routers


def expert_owner(name: str, holders: Collection[str]) -> str | None:
    """The block of the experts that a weight is part of; None if it is of none."""
    while name := _parent(name):
        if name in holders:
            return _parent(name)
    return None


def expert_blocks(model: nn.Module) -> dict[str, int]:
    """Modules that route tokens to experts, each with the number of its experts, in order.

    They hold the experts, and beside them the router.
    """
    modules = dict(model.named_modules())
    counts = {
        _parent(holder): set(_expert_counts(modules[holder])) for holder in expert_holders(modules)
    }
    return {name: counts[name].pop() for name in modules if len(counts.get(name, ())) == 1}


def roles(name: str, modules: Modules) -> list[str]:
    """Roles (`recipe.ROLES`) of a weight, by the classes of the modules that hold it."""
    while name := _parent(name):
        if re.search(ATTENTION_CLASSES, type(modules[name]).__name__):
            return ["attention"]
    return []


def _called(model: nn.Module, getter: str) -> Any:
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):  # no such method, or a model without embeddings
        return None


def _with_embeddings(model: nn.Module) -> Modules:
    """The models that know their embeddings, without those inside of them; most often `model`."""
    known: Modules = {}
    for name, module in model.named_modules():
        is_known = hasattr(module, "get_input_embeddings")
        if is_known and not any(_inside(name, outer) for outer in known):
            known[name] = module
    return known


def _base_name(prefix: str, model: nn.Module) -> str:
    """Where `model` without its head stands; its own place, `prefix`, if that is not known."""
    names: dict[int, str] = {id(m): name for name, m in model.named_modules(prefix=prefix)}
    base: nn.Module = getattr(model, "base_model", model)
    if base is model:  # transformers does not say: where the embeddings are
        embeddings = names.get(id(_called(model, "get_input_embeddings")))
        return prefix if embeddings is None else _parent(embeddings)
    return names.get(id(base), prefix)


def expert_holders(modules: Modules) -> set[str]:
    """Modules that hold the weights of all experts, in one tensor or as a list of modules."""
    fused = {
        name
        for name, module in modules.items()
        if name and not isinstance(module, nn.modules.conv._ConvNd)
        if any(p.ndim == 3 for p in module.parameters(recurse=False))
    }
    lists = {
        name
        for name, module in modules.items()
        if "expert" in name.rpartition(".")[2]
        and "shared" not in name.rpartition(".")[2]
        and not isinstance(module, nn.Linear)
        and not any(_inside(each, name) or each == name for each in fused)
    }
    return fused | {name for name in lists if not any(_inside(name, outer) for outer in lists)}


def _expert_counts(holder: nn.Module) -> Iterator[int]:
    if isinstance(holder, nn.ModuleList):
        yield len(holder)
    yield from (p.shape[0] for p in holder.parameters() if p.ndim == 3)


def _input_sizes(block: str, modules: Modules) -> Iterator[int]:
    for module in modules[block].modules():
        if isinstance(module, nn.Linear):
            yield module.in_features
        else:
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 3:
                    yield from parameter.shape[1:]


def _candidates(block: str, modules: Modules, experts: Collection[str]) -> Iterator[str]:
    """Linears that are children of the block, or the only one of such a child."""
    for leaf, _ in modules[block].named_children():
        child = f"{block}.{leaf}" if block else leaf
        if child in experts:
            continue
        if isinstance(modules[child], nn.Linear):
            yield child
        elif len(inner := _linears(dict(modules[child].named_modules()))) == 1:
            yield f"{child}.{inner[0]}"


def _linears(modules: Modules) -> list[str]:
    return [name for name, module in modules.items() if isinstance(module, nn.Linear)]


def _inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
