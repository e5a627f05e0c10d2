"""Weights of a plan, packed one scale group at a time, wherever they come from."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qat_core.checkpoint.hub import Weight
from qat_core.nvfp4 import global_scale, group_amax, quantize, require_finite
from qat_core.plan import QuantPlan
from qat_core.recipe import Recipe

Read = Callable[[str], Tensor]


def packed_weights(plan: QuantPlan, recipe: Recipe, read: Read) -> Iterator[tuple[str, Weight]]:
    """All weights by name; no more than one scale group is held in full precision.

    The same bytes as `qat_core.rollout.packed.weight_stream`, which holds all weights.

    Args:
        plan: what to pack.
        recipe: scale policies.
        read: gives the whole weight of a name, BF16 or FP32.

    Raises:
        ValueError: a weight to be packed holds NaN or infinity.
    """
    done: set[str] = set()
    for entry in plan.entries:
        if entry.name in done:
            continue
        names = (entry.name,) if entry.group is None else plan.groups[entry.group]
        done.update(names)
        if entry.group is None:
            yield entry.name, read(entry.name).to(torch.bfloat16)
        else:
            yield from _packed_group(names, recipe, read)


def model_reader(model: nn.Module, plan: QuantPlan) -> Read:
    """Reads full-precision weights of a model, prepared, sharded or neither.

    Every rank of a sharded model must read the same names in the same order.

    Raises:
        ValueError: the model holds state that the plan does not know, e.g. a persistent buffer.
    """
    state = model.state_dict()
    planned = {entry.name for entry in plan.entries}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - planned
    unknown = sorted(state.keys() - planned - tied)
    if unknown:
        raise ValueError(f"{', '.join(unknown[:3])}: no parameter, so it would be lost")

    def read(name: str) -> Tensor:
        weight: Tensor = state[name]
        return weight.full_tensor() if isinstance(weight, DTensor) else weight

    return read


def _packed_group(
    names: tuple[str, ...], recipe: Recipe, read: Read
) -> Iterator[tuple[str, Weight]]:
    weights = [read(name) for name in names]
    amax = group_amax([weights])
    require_finite(amax, [weights], [names])
    scale = global_scale(amax[0], recipe.scale)
    for name, weight in zip(names, weights, strict=True):
        yield name, quantize(weight, scale, recipe.block_scale, name=name)
