"""Shards that are written, moved or assigned: whether steps follow."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from qat_core.training.preparation import prepare, state_of
from tests.integration.fsdp_steps import DEFAULT, POLICY, Uneven, one_device, sharded, step
from tests.tiny_models import tiny_model


def written_in_one_group() -> list[bool]:
    """Whether steps equal those of one device, where FSDP2 gathers all weights before any hook.

    The weights are written through the state dict, as DTensors and as dcp does.
    """
    model = one_device(lambda: tiny_model("qwen3").float())
    single = one_device(lambda: tiny_model("qwen3"))
    fully_shard(model, mp_policy=POLICY)
    same = [torch.equal(step(model), step(single))]
    for local in (False, True):
        for entry in model.state_dict().values():
            (entry.to_local() if local else entry).mul_(2)
        for entry in single.state_dict().values():
            entry.mul_(2)
        same.append(torch.equal(step(model), step(single)))
    return same


def moved() -> dict[str, bool]:
    """Whether casts, as moves to another device do, leave no old shard, and steps go on.

    FSDP2 pads short shards again, on their ranks alone.
    """
    model = sharded(Uneven)
    out = step(model)
    weight: Any = model.layers[0].weight
    old = weakref.ref(weight.to_local().plain())
    model.bfloat16()
    gc.collect()
    return {"freed": old() is None, "same_output": torch.equal(step(model.float()), out)}


def assigned() -> dict[str, Any]:
    """Shards that take the place of those that were prepared, sharded and used: a step with them.

    As accelerate loads (`cpu_ram_efficient_loading`), also onto the meta device.
    """
    other = sharded(lambda: tiny_model("qwen3-moe", seed=1))
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    expected = step(other)
    model = sharded(lambda: tiny_model("qwen3-moe"))
    step(model)
    model.zero_grad()
    model.load_state_dict(state, assign=True)
    same = {"same_output": torch.equal(step(model), expected)}
    with torch.device("meta"):
        empty = tiny_model("qwen3-moe").float()
    prepare(empty, DEFAULT, allow_meta=True)
    for module in (*empty.model.layers, empty):
        fully_shard(module, mp_policy=POLICY)
    empty.load_state_dict(state, assign=True)
    empty.model.rotary_emb = tiny_model("qwen3-moe").model.rotary_emb  # no part of a state dict
    return same | {"from_meta": torch.equal(step(empty), expected)}


def written_by_collectives() -> dict[str, bool]:
    """Whether steps follow shards that a collective wrote, through each way to show them."""
    same = {}
    ways: dict[str, Callable[[nn.Module], list[Tensor]]] = {
        "to_local": lambda m: [p.to_local().detach() for p in m.parameters()],  # type: ignore[attr-defined]
        "state dict": lambda m: [t.to_local() for t in m.state_dict().values()],
    }
    for name, show in ways.items():
        model = sharded(lambda: tiny_model("qwen3"))
        step(model)
        model.zero_grad()
        for tensor in show(model):
            dist.all_reduce(tensor)
        got, state = step(model), state_of(model)
        assert state is not None
        state.refresh()
        same[name] = torch.equal(got, step(model))
    return same


def replicas() -> dict[str, bool]:
    """Whether whole models follow weights that a collective of two ranks or more brought."""
    same = {}
    ways: dict[str, Callable[[nn.Module], list[Tensor]]] = {
        "data": lambda m: [p.data for p in m.parameters()],
        "detach": lambda m: [p.detach() for p in m.parameters()],
        "state dict": lambda m: list(m.state_dict().values()),
    }
    for name, show in ways.items():
        model = one_device(lambda: tiny_model("qwen3", seed=dist.get_rank()))
        step(model)
        for tensor in show(model):
            dist.broadcast(tensor, dist.get_world_size() - 1)
        fresh = tiny_model("qwen3")
        fresh.load_state_dict(model.state_dict())
        prepare(fresh, DEFAULT)
        flags: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(flags, torch.equal(step(model), step(fresh)))
        same[name] = all(flags)
    return same
