"""Steps of optimizers as writes to weights, whatever kernels they write with.

Operators that write are seen by themselves. A kernel that gets a pointer, such as one of Triton's,
is not.
"""

from functools import cache
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from qat_core.held_weights import HeldWeights


@cache
def watch_steps() -> RemovableHandle:
    """From now on, a step of any optimizer of PyTorch's class marks its prepared weights."""
    return register_optimizer_step_post_hook(_mark_written)


def _mark_written(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held = getattr(parameter, "_local_tensor", parameter)
            weights: HeldWeights | None = getattr(held, "held_by", None)
            if weights is not None and parameter.grad is not None:
                weights.mark_written(held.weight_name)
