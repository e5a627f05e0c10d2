"""What verl calls inside vLLM's workers to replace their weights."""

from collections.abc import Sequence
from typing import Any

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from qat_core.rollout.vllm import compat
from qat_core.rollout.vllm.bucketed_loader import BucketedLoader
from qat_core.rollout.vllm.weight_memory import parameter_bytes, weight_bytes
from qat_core.verl.adapter import own_socket
from qat_core.verl.compat import require_vllm


class LayerwiseWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Weight sync in place, or through vLLM's own layer-wise reload, for NVFP4 and BF16.

    Selected with `rollout.engine_kwargs.vllm.worker_extension_cls`. verl's own loading patches
    parts of vLLM that have moved; unneeded once verl reloads layer by layer itself.
    """

    _has_shown_memory = False

    def __new__(cls, **_: Any) -> "LayerwiseWorkerExtension":
        """verl is not shown the model here: it would patch vLLM for its own QAT."""
        import vllm
        from vllm.platforms import current_platform

        require_vllm(vllm.__version__, on_cpu=current_platform.is_cpu())
        compat.hold_addresses(vllm.__version__)
        return super().__new__(cls)  # type: ignore[no-any-return]

    def monkey_patch_model(
        self, vocab_size: int, banned_token_ids: Sequence[int] | None = None
    ) -> None:
        """As verl's, which lets no id without a token be sampled; the exact contract says so."""
        super().monkey_patch_model(vocab_size, banned_token_ids)
        self.qat_core_vocabulary = vocab_size

    def _get_zmq_handle(self) -> str:
        return own_socket(super()._get_zmq_handle())

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Replace all weights by those that the trainer's rank sends.

        verl waits for this call before it samples: an error of `BucketedLoader` ends the run.
        """
        if peft_config is not None:
            raise ValueError("weight sync: this worker takes whole weights, no LoRA adapters")
        receiver = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm
        )
        with BucketedLoader(self) as loader:
            receiver.receive_weights(on_bucket_received=lambda bucket, _: loader.take(bucket))
        if not self._has_shown_memory:
            self._show_memory(loader.held_bytes)

    def _show_memory(self, held_bytes: int) -> None:
        """For the harness, which reads the log; verl itself reports no weight memory."""
        self._has_shown_memory = True
        if self.device.type == "cpu":
            # without 4-bit kernels vLLM unpacks there what it would hold on a GPU
            print(f"qat_core: vLLM holds {held_bytes} bytes of weights", flush=True)
            return
        held, reported = parameter_bytes(self), weight_bytes(self)
        print(f"qat_core: vLLM holds {held} bytes of weights, reports {reported}", flush=True)
