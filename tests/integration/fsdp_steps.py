"""Sharded models and a step of theirs, for comparison with one device; shards that are written."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from qat_core.planning.recipe import Recipe
from qat_core.training.parameter import FakeQuantizedTensor
from qat_core.training.preparation import prepare, state_of
from tests.tiny_models import tiny_model, tokens

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FAMILIES = ("qwen3", "qwen3-moe")
DEFAULT = Recipe()
Build = Callable[[], nn.Module]


class Uneven(nn.Module):
    """Ten rows and two rows: over four ranks one shard is short, and two shards are empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(32, 10), nn.Linear(32, 2)]).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1)


def sharded(
    build: Build,
    recipe: Recipe = DEFAULT,
    reshard: bool = True,
    policy: MixedPrecisionPolicy = POLICY,
    **options: Any,
) -> nn.Module:
    """An FP32 model, prepared, its layers and itself sharded."""
    model = one_device(lambda: build().float(), recipe)
    layers = model.model.layers if hasattr(model, "model") else [model]
    for module in {id(m): m for m in (*layers, model)}.values():
        fully_shard(module, mp_policy=policy, reshard_after_forward=reshard, **options)
    return model


def one_device(build: Build, recipe: Recipe = DEFAULT) -> nn.Module:
    model = build()
    prepare(model, recipe)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
    """Forward and backward of the same batch on every rank, then the optimizer; the output."""
    if isinstance(model, Uneven):
        out = model(torch.ones(4, 32).bfloat16())
        out.sum().backward()
    else:
        result = model(input_ids=tokens(), labels=tokens(), use_cache=False)
        result.loss.backward()
        out = result.logits
    if optimizer:
        optimizer.step()
        optimizer.zero_grad()
    return out.detach()


def compare(build: Build, recipe: Recipe = DEFAULT, **options: Any) -> dict[str, Any]:
    """One sharded step against one on a single device: output, gradients, gathered weights."""
    model, single = sharded(build, recipe, **options), one_device(build, recipe)
    out, expected = step(model), step(single)
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    differ = [n for n, p in single.named_parameters() if not torch.equal(grads[n], p.grad.float())]
    return {
        "same_output": torch.equal(out, expected),
        "grads_that_differ": differ,
        "weights_that_differ": gathered_differ(model, single),
    }


def gathered_differ(model: nn.Module, single: nn.Module) -> list[str]:
    """Quantized weights that an all-gather brings otherwise than one device rounds them."""
    rounded = {
        name: parameter.rounded()
        for name, parameter in single.named_parameters()
        if isinstance(parameter, FakeQuantizedTensor)
    }
    modules = [m for m in model.modules() if hasattr(m, "unshard")]
    for module in modules:
        module.unshard()
    gathered = dict(model.named_parameters())
    differ = [name for name, w in rounded.items() if not torch.equal(gathered[name], w)]
    for module in modules:
        module.reshard()
    return differ


def errors(model: nn.Module) -> list[str]:
    """What a step raises on each rank."""
    message, messages = "accepted", [""] * dist.get_world_size()
    try:
        step(model)
    except ValueError as error:
        message = str(error)
    dist.all_gather_object(messages, message)
    return messages


def written_in_one_group() -> dict[str, bool]:
    """Whether steps equal those of one device, where FSDP2 gathers all weights before any hook.

    The weights are written through the state dict, as DTensors and as dcp does.
    """
    model = one_device(lambda: tiny_model("qwen3").float())
    single = one_device(lambda: tiny_model("qwen3"))
    fully_shard(model, mp_policy=POLICY)
    same = {"read": torch.equal(step(model), step(single))}
    for kind in ("DTensor", "local"):
        for entry in model.state_dict().values():
            (entry.to_local() if kind == "local" else entry).mul_(2)
        for entry in single.state_dict().values():
            entry.mul_(2)
        same[kind] = torch.equal(step(model), step(single))
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
