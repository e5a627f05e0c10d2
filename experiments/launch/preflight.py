"""What can be refused only where a study runs: settings of its trainer, and GPUs."""

from collections.abc import Iterable
from pathlib import Path

from experiments.study.schema import Run, Study
from experiments.support.gpu_locks import require_gpus


def check_settings(study: Study, runs: Iterable[Run]) -> None:
    """Checks that what the runs set is known to their trainer."""
    if study.trainer == "verl":
        from experiments.verl.preflight import require_known_settings  # Hydra, needed here alone

        require_known_settings(study, runs)


def check_devices(study: Study, path: Path) -> None:
    """Checks that this machine has the GPUs of one run."""
    if study.device == "cuda":
        try:
            require_gpus(study.gpus, study.gpu_memory_gib)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
