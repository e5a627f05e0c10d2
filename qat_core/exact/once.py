"""Operators whose gradients have none themselves: kernels write them, and leave no graph behind."""

from typing import Any

import torch
from torch.autograd import Function


class Once(Function):
    """Has `gradients` in place of `backward`, as a static method.

    Other than PyTorch's `once_differentiable` it refuses at once, and costs next to nothing.
    """

    @classmethod
    def backward(cls, ctx: Any, *grads: Any) -> Any:
        """The gradients; ValueError where they are to be differentiated."""
        if torch.is_grad_enabled():
            raise ValueError("exact: gradients have no gradients; leave create_graph=True out")
        return cls.gradients(ctx, *grads)  # type: ignore[attr-defined]
