"""A function call in a subprocess; temporary files that are gone when their user has ended."""

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, TypeVar

from experiments.support.signals import end_with_parent

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


VARIABLE = "TMPDIR"


@contextmanager
def private_temporary_folder() -> Iterator[Path]:
    """Temporary files of this process and of children that it starts lie in a folder of its own.

    The folder is removed with all that is left in it: vLLM leaves a `vllm_dist_*` for each engine.
    """
    previous, previous_variable = tempfile.tempdir, os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory(prefix="qat-", ignore_cleanup_errors=True) as folder:
        os.environ[VARIABLE] = tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = previous
            if previous_variable is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = previous_variable
