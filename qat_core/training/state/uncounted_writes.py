"""Writes to weights that PyTorch counts in no version: in-place collectives and optimizers' steps.

A collective's operator does not say that it writes. Those on tensors that share memory with a
prepared weight, such as an entry of a state dict, are seen here. Operators of an optimizer that
write are seen by themselves; a kernel that gets a pointer, such as one of Triton's, is not, so that
its step counts as the write.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from qat_core.training.state.held_weights import HeldWeights

# Operators of `torch.ops.c10d` whose first argument is written: a tensor, or lists of them.
WRITING = (
    *("broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "recv_", "recv_any_source_"),
    *("gather_", "scatter_", "alltoall_", "alltoall_base_", "reduce_scatter_"),
    *("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "allgather_"),
    *("_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
)

_watched: "WeakSet[HeldWeights]" = WeakSet()


def watch(weights: HeldWeights) -> None:
    """From now on, collectives and optimizers that write one of `weights` mark it as written."""
    _watched.add(weights)
    if dist.is_available():
        _watch_collectives()
    _watch_optimizers()


@cache
def _watch_collectives() -> torch.library.Library:
    """Kernels where PyTorch counts the versions of ordinary in-place operators."""
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name in WRITING:
        operator = getattr(torch.ops.c10d, name).default
        library.impl(name, partial(_run, operator), "ADInplaceOrView")  # type: ignore[no-untyped-call]
    return library


def _run(operator: Callable[..., Any], written: Any, *others: Any, **options: Any) -> Any:
    for tensor in _tensors(written):
        for weights in _watched:
            weights.mark_memory_written(tensor)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return operator(written, *others, **options)


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    else:
        for item in argument:
            yield from _tensors(item)


@cache
def _watch_optimizers() -> RemovableHandle:
    return register_optimizer_step_post_hook(_mark_stepped)


def _mark_stepped(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held = getattr(parameter, "_local_tensor", parameter)
            weights: HeldWeights | None = getattr(held, "held_by", None)
            if weights is not None and parameter.grad is not None:
                weights.mark_written(held.weight_name)
