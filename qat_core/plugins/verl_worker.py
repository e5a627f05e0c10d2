"""What verl calls inside vLLM's workers to replace their weights."""

from contextlib import ExitStack
from typing import Any

from torch import Tensor
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from qat_core.rollout import vllm_seam
from qat_core.rollout.vllm_worker import Load, quantized_parameters, reloading, weight_bytes
from qat_core.rollout.wire import ANNOUNCEMENT, Assembler, read_announcement


class LayerwiseWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Weight sync through vLLM's own layer-wise reload, for NVFP4 and BF16.

    Selected with `rollout.engine_kwargs.vllm.worker_extension_cls`. verl's own loading patches
    parts of vLLM that moved; it would be unneeded once verl reloads layer by layer itself.
    """

    def __new__(cls, **_: Any) -> "LayerwiseWorkerExtension":
        """Not shown the model: verl would patch vLLM for its own QAT."""
        import vllm

        vllm_seam.require_supported(vllm.__version__)
        vllm_seam.hold_addresses(vllm.__version__)
        return super().__new__(cls)  # type: ignore[no-any-return]

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Replace all weights by those that the trainer's rank sends.

        Raises:
            ValueError: they are not what this engine serves; nothing has been replaced.
        """
        if peft_config is not None:
            raise ValueError("weight sync: this worker takes whole weights, no LoRA adapters")
        receiver = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm
        )
        with ExitStack() as stack:
            incoming = _Incoming(self, stack)
            receiver.receive_weights(on_bucket_received=incoming.take)
            incoming.finish()
        if not getattr(self, "_has_told_memory", False):
            self._has_told_memory = True
            # a CPU has no 4-bit kernels: vLLM unpacks there what it receives
            is_cpu = self.device.type == "cpu"
            held = incoming.received_bytes if is_cpu else weight_bytes(self)
            print(f"qat_core: vLLM holds {held} bytes of weights", flush=True)


class _Incoming:
    """Loads buckets as they come.

    The sender waits for an answer to every bucket, so that a failure is raised only after the last.
    """

    def __init__(self, worker: Any, stack: ExitStack) -> None:
        self.worker, self.stack = worker, stack
        self.assembler = Assembler()
        self.load: Load | None = None
        self.error: Exception | None = None
        self.received_bytes = 0

    def take(self, bucket: list[tuple[str, Tensor]], is_last: bool) -> None:
        if self.error is None:
            try:
                self._load(bucket)
            except Exception as error:
                self.error = error

    def finish(self) -> None:
        if self.error is not None:
            raise self.error
        self.assembler.require_complete()

    def _load(self, bucket: list[tuple[str, Tensor]]) -> None:
        if self.load is None:
            announced = bucket[0][0] == ANNOUNCEMENT
            if announced:
                _require_served(self.worker, bucket.pop(0)[1])
            self.load = self.stack.enter_context(reloading(self.worker, fused_experts=announced))
        self.received_bytes += sum(tensor.nbytes for _, tensor in bucket)
        self.load(self.assembler.take(bucket))


def _require_served(worker: Any, announcement: Tensor) -> None:
    served = set(quantized_parameters(worker))
    sent = {name for name, (_, packed) in read_announcement(announcement).items() if packed}
    for names, problem in (
        (sent - served, "packed, but served in BF16"),
        (served - sent, "in BF16, but served in NVFP4"),
    ):
        if names:
            raise ValueError(
                f"weight sync: {len(names)} weights come {problem}: {sorted(names)[:3]}"
            )
