"""Sharded models and a step of theirs, for comparison with one device."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from qat_core.planning.recipe import Recipe
from qat_core.training.parameter import FakeQuantizedTensor
from qat_core.training.preparation import prepare
from tests.tiny_models import tokens

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FAMILIES = ("qwen3", "qwen2", "qwen3-moe")
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
