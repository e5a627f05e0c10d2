"""Weights of a plan, packed one scale group at a time, wherever they come from."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qat_core.plan import QuantPlan
from qat_core.recipe import Recipe
from qat_core.weights.hub_names import Weight
from qat_core.weights.packing import group_scales, pack

Read = Callable[[str], Tensor]


def packed_weights(
    plan: QuantPlan, recipe: Recipe, read: Read, *, resident: bool = False
) -> Iterator[tuple[str, Weight]]:
    """All weights by name, whole; no more than one scale group is held in full precision.

    Args:
        plan: what to pack.
        recipe: scale policies.
        read: gives the weight of a name, BF16 or FP32. Of sharded weights it gives DTensors, and
            all ranks have to go through this together.
        resident: `read` hands out what is on the device already, again and again. All scales are
            then found before the first weight is yielded, with one wait for the device, not one a
            group.

    Raises:
        ValueError: a weight to be packed holds NaN or infinity in BF16; on every rank alike.
    """
    scales: dict[str, Tensor] = {}
    if resident:
        groups = [{name: read(name) for name in names} for names in plan.groups.values()]
        scales = dict(zip(plan.groups, group_scales(groups, recipe.scale), strict=True))
    for entry in plan.entries:
        if entry.group is None:
            yield entry.name, _unpacked(read(entry.name))
        elif entry.name == plan.groups[entry.group][0]:  # the others of its group come along
            names = plan.groups[entry.group]
            known = scales.get(entry.group)
            yield from _packed_group({name: read(name) for name in names}, known, recipe)


def model_reader(model: nn.Module, plan: QuantPlan) -> Read:
    """Reads full-precision weights of a model, prepared, sharded (as DTensors) or neither.

    Raises:
        ValueError: the model holds state that the plan does not know, e.g. a persistent buffer.
    """
    state = model.state_dict()
    planned = {entry.name for entry in plan.entries}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - planned
    unknown = sorted(state.keys() - planned - tied)
    if unknown:
        raise ValueError(f"{', '.join(unknown[:3])}: no parameter, so it would be lost")
    read: Read = state.__getitem__
    return read


def _unpacked(weight: Tensor) -> Tensor:
    weight = weight.to(torch.bfloat16)
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _packed_group(
    members: dict[str, Tensor], scale: Tensor | None, recipe: Recipe
) -> Iterator[tuple[str, Weight]]:
    """A function of its own, so that its weights are freed before those of the next are read."""
    if scale is None:
        (scale,) = group_scales([members], recipe.scale)
    for name, weight in members.items():
        yield name, pack(name, weight, scale, recipe.block_scale)
