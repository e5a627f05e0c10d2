"""A function call in a subprocess."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

Result = TypeVar("Result")


def call_in_subprocess(function: Callable[..., Result], *arguments: Any) -> Result:
    """What `function(*arguments)` returns in a new process, which then ends.

    A process captures CUDA graphs of one vLLM engine only, and frees its memory at its end.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result()
