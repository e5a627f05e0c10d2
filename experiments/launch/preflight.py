"""What stands in the way of executing a study that can well be planned."""

from collections.abc import Iterable
from pathlib import Path

from experiments.study.schema import Run, Study
from experiments.support.gpu_locks import require_gpus


def require_executable(study: Study, runs: Iterable[Run]) -> None:
    """Checks that what the runs set is known to their trainer.

    Raises:
        ValueError: a line a key, "<file>: <key>: <what>; <mend>", or verl is not installed.
    """
    if study.trainer == "verl":
        from experiments.verl.preflight import require_known_settings  # Hydra, needed here alone

        require_known_settings(study, runs)


def require_devices(study: Study, path: Path) -> None:
    """Checks that this machine has the GPUs of one run.

    Raises:
        ValueError: it has fewer.
    """
    if study.device == "cuda":
        try:
            require_gpus(study.gpus)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
