"""What travels from a trainer to an engine or a file: BF16 tensors and packed NVFP4 weights."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qat_core.planning.plan import QuantPlan, bf16_plan, uncompiled
from qat_core.planning.recipe import Recipe, require_recipe
from qat_core.training.preparation import refuse_adapters, require_as_prepared, state_of
from qat_core.training.state_dicts import full_precision_state
from qat_core.weights.hub_names import Weight
from qat_core.weights.packing import (
    finite_unpacked,
    group_scales,
    measured_scales,
    pack,
    require_finite_unpacked,
)

Read = Callable[[str], Tensor]
# names of a group, or of one that is not packed, and whether they are finite: asked for once
# everything is queued
Unchecked = list[tuple[tuple[str, ...], Tensor]]
AS_PREPARED: Any = object()  # not None, which packs nothing


def weight_stream(
    model: nn.Module,
    plan: QuantPlan | None = AS_PREPARED,
    recipe: Recipe | None = AS_PREPARED,
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, Weight]]:
    """All weights by name, whole: those that the plan quantizes packed, the others in BF16.

    Global scales come from the BF16 values of the weights as they are now, by the rule that the
    fake quantization of training uses, so a prepared model streams the very numbers it trains with.
    A prepared model then checks all its weights again: writes that it missed end here.
    A group of weights is held at a time. Of an FSDP2-sharded model every rank packs its shards and
    only packed bytes are gathered; all ranks have to go through the stream together.

    Args:
        model: the trained model, prepared or not, sharded or not, BF16 or FP32, on any device.
        plan: what to pack, from `planning.plan.plan`; None packs nothing. By default what `prepare`
            returned, and nothing of a model that is not prepared.
        recipe: scale policies, None exactly if plan is. By default the recipe that `prepare` got.
        device: where to pack, and where the stream's tensors lie; None leaves weights where they
            are.

    Raises:
        ValueError: at once if just one of plan and recipe is None, or the model was prepared with
            others, has adapters of PEFT or a weight that was replaced after `prepare`, or holds
            other state than the plan knows; naming a weight that is not finite in BF16, packed or
            not, on all ranks alike: before the first weight, or after the last if weights have to
            be moved to a GPU. After the last, too, if weights were written in the meantime.
    """
    model = uncompiled(model)
    refuse_adapters(model)
    state = state_of(model)
    if state is not None:
        state.weights.find()
        state.weights.mark_all_written()
    marked = state.weights.num_writes if state else {}
    prepared = (state.plan, state.recipe) if state else (None, None)
    plan = prepared[0] if plan is AS_PREPARED else plan
    recipe = prepared[1] if recipe is AS_PREPARED else recipe
    if (plan is None) != (recipe is None):
        given, lacking = ("recipe", "plan") if plan is None else ("plan", "recipe")
        raise ValueError(
            f"weight_stream: has a {given} but no {lacking}, and would pack nothing: give both; "
            "neither for a prepared model, which knows its own; or None twice for BF16"
        )
    if plan is None or recipe is None:
        plan, recipe = bf16_plan(model), Recipe()
    else:
        require_recipe(recipe)
        require_as_prepared(model, plan, recipe)
    held = full_precision_state(model)
    _require_planned(model, plan, held)
    return _unwritten(_packed(plan, recipe, held, device), held, marked)


def _packed(
    plan: QuantPlan, recipe: Recipe, state: Mapping[str, Tensor], device: torch.device | str | None
) -> Iterator[tuple[str, Weight]]:
    kind = None if device is None else torch.device(device).type
    resident = kind is None or all(state[e.name].device.type == kind for e in plan.entries)
    is_copied = kind == "cuda" and not resident  # nobody would wait for copies to the host

    def read(name: str) -> Tensor:
        held = state[name]
        return held if device is None else held.to(device, non_blocking=is_copied)

    yield from packed_weights(plan, recipe, read, resident=resident)
    if is_copied:  # weights on the host may be written from now on
        torch.cuda.synchronize(device)


def _unwritten(
    stream: Iterator[tuple[str, Weight]], state: Mapping[str, Any], marked: Mapping[str, int]
) -> Iterator[tuple[str, Weight]]:
    """ValueError at its end for a weight that was written meanwhile: its scale is an older one's.

    `marked` counts how often operators wrote weights below PyTorch's own count.
    """

    def num_writes() -> dict[str, tuple[int, int]]:
        return {name: (_version(tensor), marked.get(name, 0)) for name, tensor in state.items()}

    before = num_writes()
    yield from stream
    for name, number in num_writes().items():
        if number != before[name]:
            raise ValueError(
                f"{name}: written while its stream was read, so that what came is of no one step: "
                "stream again, and write weights before or after"
            )


def _version(held: Any) -> int:
    """0 for extra state, and for tensors of inference mode, which have none."""
    local = getattr(held, "_local_tensor", held)
    return local._version if isinstance(local, Tensor) and not local.is_inference() else 0


def packed_weights(
    plan: QuantPlan, recipe: Recipe, read: Read, *, resident: bool = False
) -> Iterator[tuple[str, Weight]]:
    """As `weight_stream`, of weights that are read by name, wherever they come from.

    Of sharded weights `read` gives DTensors, and all ranks have to go through this together. What
    is `resident` it gives without a copy: all scales are then found before the first weight is
    yielded, with one wait for the device. Else a GPU gets group after group without a wait in
    between, and is waited for at the end.
    """
    scales: dict[str, Tensor] = {}
    unchecked: Unchecked = []
    if resident:
        require_finite_unpacked({e.name: read(e.name) for e in plan.entries if e.group is None})
        groups = [{name: read(name) for name in names} for names in plan.groups.values()]
        scales = dict(zip(plan.groups, group_scales(groups, recipe.scale_policy), strict=True))
    for entry in plan.entries:
        if entry.group is None:
            weight = read(entry.name).to(getattr(torch, entry.dtype))
            weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
            if not resident and weight.is_floating_point():
                unchecked.append(((entry.name,), finite_unpacked([weight])[0]))
            yield entry.name, weight
        elif entry.name == plan.groups[entry.group][0]:  # the others of its group come along
            names = plan.groups[entry.group]
            known = scales.get(entry.group)
            yield from _packed_group({n: read(n) for n in names}, known, recipe, unchecked)
    _require_finite(unchecked, read, recipe)


def _require_planned(model: nn.Module, plan: QuantPlan, state: Mapping[str, object]) -> None:
    planned = {entry.name for entry in plan.entries}
    if lacking := sorted(planned - state.keys()):
        names = ", ".join(lacking[:3])
        raise ValueError(f"{names}: in the plan but not in the model: make its plan of this model")
    unknown = state.keys() - planned
    if unknown:  # a tied weight has an entry under one of its names only
        parameters = dict(model.named_parameters(remove_duplicate=False))
        sent = {id(parameters[name]) for name in planned & parameters.keys()}
        unknown -= {name for name, parameter in parameters.items() if id(parameter) in sent}
    if unknown:
        names = ", ".join(sorted(unknown)[:3])
        raise ValueError(f"{names}: in the model's state but not in its plan, so it would be lost")


def _packed_group(
    members: dict[str, Tensor], scale: Tensor | None, recipe: Recipe, unchecked: Unchecked
) -> Iterator[tuple[str, Weight]]:
    """A function of its own, so that its weights are freed before those of the next are read."""
    if scale is None and next(iter(members.values())).is_cuda:
        (scale,), finite = measured_scales([members], recipe.scale_policy)
        unchecked.append((tuple(members), finite))
    elif scale is None:
        (scale,) = group_scales([members], recipe.scale_policy)
    for name, weight in members.items():
        yield name, pack(name, weight, scale, recipe.block_scale_method)


def _require_finite(unchecked: Unchecked, read: Read, recipe: Recipe) -> None:
    """Waits for the device once; reads a group again to say which of its weights is not finite."""
    if not unchecked or bool(torch.stack([finite for _, finite in unchecked]).all()):
        return
    names = next(names for names, finite in unchecked if not bool(finite))
    weights = {name: read(name) for name in names}
    require_finite_unpacked(weights)
    group_scales([weights], recipe.scale_policy)
    raise AssertionError(f"{names}: finite once read again")
