"""Memory that a run takes, seen from outside: trainer and vLLM together.

verl's own figures are of what the actor allocates, and are taken while vLLM sleeps.
"""

import os
import shutil
import subprocess

import psutil

from experiments.support.gpu_locks import VISIBLE
from qat_core.units import BYTES_PER_GIB, MIB_PER_GIB

GPU_MEMORY, HOST_MEMORY = "perf/gpu_memory_used_gib", "perf/host_memory_used_gib"
USED_MIB = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


class PeakMemory:
    """The most memory in use at any look.

    Attributes:
        peaks_gib: by metric; of the fullest of the run's GPUs, and of the whole host, its shared
            memory included.
    """

    def __init__(self, device: str) -> None:
        self.has_gpus = device == "cuda" and shutil.which(USED_MIB[0]) is not None
        self.peaks_gib: dict[str, float] = {}

    def look(self) -> None:
        """Takes into account what is in use now."""
        host = psutil.virtual_memory()
        self._note(HOST_MEMORY, (host.total - host.available) / BYTES_PER_GIB)
        if self.has_gpus:
            command = [*USED_MIB, f"--id={os.environ[VISIBLE]}"]  # the launcher locked these
            listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            for mib in filter(str.isdecimal, listed.split()):
                self._note(GPU_MEMORY, int(mib) / MIB_PER_GIB)

    def _note(self, metric: str, gib: float) -> None:
        self.peaks_gib[metric] = max(gib, self.peaks_gib.get(metric, 0.0))
