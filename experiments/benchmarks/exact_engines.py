"""Engines of `zero_mismatch`: one worker in this process, or tensor parallel ones."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.exact_cases import Case
from qat_core.planning.plan import QuantPlan
from qat_core.rollout.engine import WeightStream
from qat_core.rollout.vllm.engine import ONE_WORKER, VllmEngine
from qat_core.rollout.vllm.worker import reload, worker_names


class RankedEngine(VllmEngine):
    """A worker on each of several GPUs, as users have them through verl alone."""

    one_worker = tuple(name for name in ONE_WORKER if name != "tensor_parallel_size")

    def sync(self, stream: WeightStream, expected: QuantPlan | None = None) -> None:
        """Through a file, which each worker reads, as each is a process."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "weights.pt"
            torch.save([*stream], file)
            self._has_weights = False
            self._llm.collective_rpc(_reload, args=(str(file),))
        self.forget_prefixes()
        self._has_weights = True


def start_engine(
    case: Case, checkpoint: Path, served: QuantPlan | None, settings: Mapping[str, Any]
) -> VllmEngine:
    """That of a case; `served` is in NVFP4."""
    if case.engine_ranks == 1:
        return VllmEngine(checkpoint, served, exact=case.exact_engine, **settings)
    ranks = {
        "tensor_parallel_size": case.engine_ranks,
        "enable_expert_parallel": case.expert_parallel,
    }
    return RankedEngine(checkpoint, served, exact=case.exact_engine, **settings, **ranks)


def _reload(worker: Any, file: str) -> None:
    weights = torch.load(file, map_location=worker.device, weights_only=False)
    reload(worker, worker_names(worker), weights, dict(weights))
