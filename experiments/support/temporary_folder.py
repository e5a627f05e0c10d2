"""Temporary files that are gone when their user has ended."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
