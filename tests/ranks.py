"""Ranks of a process group, each a process of its own."""

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

from torch.multiprocessing.spawn import start_processes

# what every rank would need seconds to import
SLOW_MODULES = ["torch.distributed.fsdp", "qat_core.checkpoint"]


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int) -> None:
    """Calls `function(rank, *arguments)` in so many processes, and waits for them.

    They are forked, from a process that has nothing but modules: threads of tests that ran before
    hold locks, which processes that were forked from this one would wait for. Their environment is
    that of the first call.
    """
    get_context("forkserver").set_forkserver_preload(SLOW_MODULES)
    start_processes(function, arguments, num_ranks, start_method="forkserver")
