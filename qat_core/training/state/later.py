"""A truth value that a GPU computes, read later without waiting for what it was given meanwhile."""

from typing import Any

import torch
from torch import Tensor


class Later:
    """Whether `value`, bool and 0-D, is true.

    `bool(value)` waits for all that its CUDA stream was given before it is asked. This waits for
    what the stream was given before it was made: the value is copied to pinned memory at once.
    """

    def __init__(self, value: Tensor) -> None:
        self._value, self._copied = value, None
        if value.is_cuda:
            self._value = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._copied = torch.cuda.current_stream(value.device).record_event()

    def __bool__(self) -> bool:
        """Waits for the copy, if the GPU has not come to it yet."""
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._value)

    def __reduce__(self) -> tuple[type["Later"], tuple[Any, ...]]:
        """Pickles as what is known by then; events cannot."""
        return Later, (torch.tensor(bool(self)),)
