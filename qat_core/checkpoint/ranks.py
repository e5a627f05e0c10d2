"""What one rank does alone between collectives, without leaving the others behind in them."""

from collections import deque
from collections.abc import Callable, Iterable

import torch.distributed as dist


def on_first_rank(task: Callable[[], None], gathers: Iterable[object] = ()) -> None:
    """Run `task` on rank 0; it returns, or raises, on all ranks together.

    All ranks go through `gathers`, which `task` may do wholly or, where it fails, in part. Other
    ranks raise a ValueError of the same text.
    """
    error = _error_of(task) if dist.get_rank() == 0 else None
    in_gathers = _error_of(lambda: deque(gathers, maxlen=0))  # else the other ranks wait in them
    error = error or in_gathers
    message = [str(error) if error else None]
    dist.broadcast_object_list(message, src=0)
    if error:
        raise error
    if message[0] is not None:
        raise ValueError(message[0])


def _error_of(task: Callable[[], object]) -> Exception | None:
    try:
        task()
    except Exception as error:
        return error
    return None
