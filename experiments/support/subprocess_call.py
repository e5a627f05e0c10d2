"""A function call in a subprocess."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

from experiments.support.temporary_folder import private_temporary_folder

Result = TypeVar("Result")


def call_in_subprocess(function: Callable[..., Result], *arguments: Any) -> Result:
    """What `function(*arguments)` returns in a new process, which then ends.

    A process captures CUDA graphs of one vLLM engine only, and frees its memory at its end; its
    temporary files are removed then.
    """
    context = get_context("spawn")
    with private_temporary_folder(), ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(function, *arguments).result()
