"""Whether this thread runs a forward or a backward pass: the first is read off its stack of calls.

No flag says so, which calls inside calls, other threads and interrupted calls would leave wrong.
Only operators ask that seldom run on weights. What torch.compile traces asks while it is traced.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch.autograd.graph
import torch.utils.checkpoint
from torch import nn

CALLS = {"_call_impl", "forward"}  # the second: `model.forward(x)`


def runs_forward(is_part: Callable[[nn.Module], bool]) -> bool:
    """Whether a forward pass of a module that `is_part` accepts runs, or is computed again.

    What runs in a backward pass belongs to it, not to the forward pass that may have called it.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is torch.autograd.graph._engine_run_backward.__code__:
            return False
        if code.co_filename == torch.utils.checkpoint.__file__:
            return True  # its function may stand outside of modules
        if code.co_name in CALLS and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, nn.Module) and is_part(owner):
                return True
        frame = frame.f_back
    return False


def in_backward() -> bool:
    """Whether this thread runs a backward pass, or what is computed again in one."""
    return torch._C._current_graph_task_id() != -1
