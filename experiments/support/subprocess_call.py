"""A function call in a subprocess."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from typing import Any, TypeVar

from experiments.support.signals import end_with_parent
from experiments.support.temporary_folder import private_temporary_folder

Result = TypeVar("Result")


def call_in_subprocess(function: Callable[..., Result], *arguments: Any) -> Result:
    """What `function(*arguments)` returns in a new process, which then ends.

    A process captures CUDA graphs of one vLLM engine only, and frees its memory at its end; its
    temporary files are removed then. It ends at once when this process ends or is interrupted.
    """
    process = ProcessPoolExecutor(1, get_context("spawn"), end_with_parent)
    with private_temporary_folder(), process:
        try:
            return process.submit(function, *arguments).result()
        except KeyboardInterrupt:
            for child in active_children():
                child.kill()  # else leaving the block would wait for its result
            raise
