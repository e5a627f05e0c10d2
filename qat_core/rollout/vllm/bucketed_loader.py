"""A weight stream that arrives in buckets, loaded into a vLLM worker."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any

from torch import Tensor

from qat_core.exact.contract import CONTRACT_NAME, from_tensor, require_kept
from qat_core.nvfp4 import PackedTensor
from qat_core.planning.plan import QuantPlan
from qat_core.rollout.vllm.plugin import require_loaded
from qat_core.rollout.vllm.served_layers import quantized_parameters, require_not_block_fp8
from qat_core.rollout.vllm.switches import is_exact
from qat_core.rollout.vllm.worker import Load, reloading, worker_names
from qat_core.weights.hub_names import Weight, meta_weights
from qat_core.weights.transfer import (
    FIX,
    PLAN_NAME,
    Assembler,
    ExpectedWeights,
    TiedCopies,
    read_plan,
)


class BucketedLoader:
    """Loads buckets as they come; a context manager around one sync.

    Senders wait for an answer to every bucket, so that what went wrong is raised only at the end.
    A stream without a plan is loaded name by name, as the hub names the weights. Whether it is
    complete is then up to its sender, as in verl.

    Attributes:
        held_bytes: size of the weights that came, those that are not packed in vLLM's dtype.
    """

    def __init__(self, worker: Any) -> None:
        self.held_bytes = 0
        self._worker = worker
        self._assembler = Assembler()
        self._expected: ExpectedWeights | None = None
        self._copies = TiedCopies({})
        self._reload = ExitStack()
        self._load: Load | None = None
        self._error: Exception | None = None

    def take(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Loads what a bucket completes, or nothing after a failure; the bucket may be reused."""
        if self._error is not None:
            return
        try:
            self._take(list(bucket))
        except Exception as error:
            self._error = error

    def __enter__(self) -> "BucketedLoader":
        return self

    def __exit__(self, *exception: Any) -> None:
        """Ends the reload.

        Raises:
            ValueError: what is expected as packed is not what vLLM serves in NVFP4: none was
                replaced. Or what came is not what was expected, or not all of it: vLLM then
                holds a mixture that must not be served.
            Exception: any other of the reload's or the transport's, with the same mixture.
        """
        with self._reload:
            error = self._error or exception[1]
            if error is not None:
                raise error
            self._assembler.require_complete()
            if not self.held_bytes:
                raise ValueError(f"weight sync: no weight came: {FIX}")
            if self._expected is not None:
                self._expected.require_none()

    def _take(self, bucket: list[tuple[str, Tensor]]) -> None:
        if self._load is None:
            self._require_contract(bucket)
            names = worker_names(self._worker)
            if bucket and bucket[0][0] == PLAN_NAME:
                expected = read_plan(bucket.pop(0)[1])
                names.refuse_own_values([entry.name for entry in expected.entries], "weight sync")
                require_served(self._worker, expected)
                self._expected = ExpectedWeights(dict(meta_weights(expected)))
            elif served := quantized_parameters(self._worker, names):
                raise ValueError(
                    f"weight sync: came without a plan, but {len(served)} weights are served in "
                    "NVFP4: another engine than qat_core.verl.engine.NvFp4Engine streams them"
                )
            else:
                require_not_block_fp8(self._worker)
                self._copies = TiedCopies(names.tied)  # verl's own engine sends both
            reload = reloading(self._worker, names, fused_experts=self._expected is not None)
            self._load = self._reload.enter_context(reload)
        weights = self._assembler.take(bucket)
        if self._expected is not None:
            weights = self._expected.checked(weights)
        else:
            weights = self._copies.left_out(weights)
        self._load(self._counted(weights))

    def _require_contract(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Takes the trainer's contract out of the first bucket, if rollouts are exact."""
        comes = bool(bucket) and bucket[0][0] == CONTRACT_NAME
        if comes != is_exact():
            who = "the trainer is" if comes else "vLLM is"
            raise ValueError(f"exact: only {who}: give +exact=on on verl's command line")
        if comes:
            require_loaded()  # else each entry of the contract differs
            from qat_core.rollout.vllm.exact.install import contract

            require_kept(from_tensor(bucket.pop(0)[1]), contract(self._worker))

    def _counted(self, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        dtype = self._worker.model_config.dtype  # verl's own engine sends its FP32 weights
        for name, weight in weights:
            packed = isinstance(weight, PackedTensor)
            self.held_bytes += weight.nbytes if packed else prod(weight.shape) * dtype.itemsize
            yield name, weight


def require_served(worker: Any, expected: QuantPlan) -> None:
    """ValueError if what comes packed is not exactly what vLLM holds in NVFP4."""
    found = quantized_parameters(worker, worker_names(worker))
    sent, served = set(expected.quantized), set(found)
    for names, problem in (
        (sent - served, "come packed but are served in BF16"),
        (served - sent, "come in BF16 but are served in NVFP4"),
    ):
        if names:
            raise ValueError(f"weight sync: {len(names)} weights {problem}: {sorted(names)[:3]}")
