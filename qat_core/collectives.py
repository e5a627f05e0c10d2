"""In-place collectives as writes to weights.

PyTorch counts them in no version, and their operators do not say that they write. Those on tensors
that share memory with a prepared weight, such as an entry of a state dict, are seen here.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from qat_core.held_weights import HeldWeights

# Operators of `torch.ops.c10d` whose first argument is written: a tensor, or lists of them.
WRITING = (
    *("broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "recv_", "recv_any_source_"),
    *("gather_", "scatter_", "alltoall_", "alltoall_base_", "reduce_scatter_"),
    *("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "allgather_"),
    *("_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
)

_watched: "WeakSet[HeldWeights]" = WeakSet()


def watch(weights: HeldWeights) -> None:
    """From now on, collectives that write one of `weights` mark it as written."""
    _watched.add(weights)
    if dist.is_available():
        _install()


@cache
def _install() -> torch.library.Library:
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
