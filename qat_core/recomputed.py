"""Rounded weights of what a backward pass computes again, kept until their backward product.

Under gradient checkpointing a weight would be rounded three times a step: in the forward pass, in
its repetition within the backward pass (recompute), and for the backward product, as autograd keeps
the parameter itself. The last two follow each other: the product takes what the recompute rounded.

It lives as long as autograd needs it, without any bookkeeping: a product saves the view of the
weight that it read, such as `weight.t()`. Views made in a backward pass share one `Kept` a weight,
which goes with the last of them: after the backward product; at once if there will be none, as for
an input that needs no gradient; with the graph after an error. A product that reads the parameter
through no view may round again. What a backward pass derives from views of the forward pass, as
without checkpoints, keeps nothing.

The cost is memory: in a backward pass the rounded weights of one checkpointed segment, in the
parameter's dtype, 2 bytes a weight in BF16. With `create_graph=True` they stay as long as the graph
of the gradient does.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Kept:
    """The rounded values of one weight, or of one of its experts."""

    def __init__(self) -> None:
        self._rounded: tuple[Any, Tensor] | None = None

    def read(
        self, num_refreshes: int, device: torch.device, compute: Callable[[], Tensor]
    ) -> Tensor:
        """The rounded values, computed if there are none of this refresh and CUDA stream.

        Another stream might read them too early, or when their memory is used again.
        """
        made = num_refreshes, torch.cuda.current_stream(device) if device.type == "cuda" else None
        kept = self._rounded
        if kept is None or kept[0] != made:
            kept = self._rounded = made, compute()
        return kept[1]


class Recomputed:
    """What is kept of each weight while a view that a backward pass made of it lives."""

    def __init__(self) -> None:
        self._kept: WeakValueDictionary[tuple[str, int | None], Kept] = WeakValueDictionary()

    def share(self, name: str, expert: int | None) -> Kept:
        """For a view to hold, which is of weight `name` or of its expert."""
        return self._kept.setdefault((name, expert), Kept())

    def find(self, name: str, expert: int | None) -> Kept | None:
        """What the views hold; None outside of a backward pass, as nobody may need it there."""
        return self._kept.get((name, expert)) if in_backward() else None

    def __reduce__(self) -> tuple[type["Recomputed"], tuple[()]]:
        """A copy is of other weights."""
        return Recomputed, ()


def in_backward() -> bool:
    """Whether this thread runs a backward pass, or what is computed again in one."""
    return torch._C._current_graph_task_id() != -1
