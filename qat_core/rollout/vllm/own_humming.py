"""vLLM 0.33's own Humming kernels through weight syncs, which need what a reload would change.

CUDA graphs are captured with the addresses of locks, of which a reload makes new ones. And the
layout of experts depends on values: where gate and up of an expert have one global scale, as syncs
send them, it is kept for the expert, else for each row. A start without weights (`load_format`
dummy) draws them apart, and no reload of an expert fits then. A linear layer's bias loses what a
reload needs to know of it.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from qat_core.rollout.vllm.kernel_choice import EXPERTS_CLASSES, LINEAR_CLASSES
from qat_core.rollout.vllm.switches import VLLM_HUMMING, VLLM_HUMMING_INVARIANT

if TYPE_CHECKING:
    from torch import nn


class _BatchInvariant:
    """vLLM's variables as in its batch-invariant mode, which serves no linear layers in W4A16.

    Humming's tiles are then chosen without the number of rows, and each sum is added in one block
    of threads.
    """

    VLLM_BATCH_INVARIANT = True

    def __getattr__(self, name: str) -> Any:
        from vllm import envs

        return getattr(envs, name)


def install(linear: str, experts: str) -> None:
    """For the process's engines, by names of `switches`. A call after the first adds nothing."""
    if linear == VLLM_HUMMING_INVARIANT:
        from vllm.model_executor.layers.quantization.utils.humming import linear as of_linear

        of_linear.envs = _BatchInvariant()
    if experts == VLLM_HUMMING_INVARIANT:
        from vllm.model_executor.layers.fused_moe.experts import fused_humming_moe as of_experts

        of_experts.envs = _BatchInvariant()
    _keep_through_syncs()


def _keep_through_syncs() -> None:
    from vllm.model_executor.kernels.linear.nvfp4.humming import HummingNvFp4LinearKernel
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as nvfp4_moe,
    )

    method = nvfp4_moe.CompressedTensorsW4A4Nvfp4MoEMethod
    hold_locks(HummingNvFp4LinearKernel, lambda kernel: kernel)
    hold_locks(method, lambda it: getattr(it.moe_kernel, "fused_experts", None))
    share_dummy_scales(method)


def hold_locks(owner: Any, holder_of: Callable[[Any], Any]) -> None:
    """Wrap `process_weights_after_loading`: the `locks` of what it makes keep their memory."""
    original = owner.process_weights_after_loading
    if getattr(original, "holds_locks", False):
        return

    @wraps(original)
    def process_with_locks(self: Any, layer: Any) -> None:
        locks = getattr(holder_of(self), "locks", None)
        original(self, layer)
        if locks is not None:
            holder_of(self).locks = locks.zero_()  # a sleep has left anything there

    process_with_locks.holds_locks = True  # type: ignore[attr-defined]
    owner.process_weights_after_loading = process_with_locks


def share_dummy_scales(owner: Any) -> None:
    """Wrap `process_weights_after_loading` of experts: at a start without weights up has gate's."""
    original = owner.process_weights_after_loading
    if getattr(original, "shares_dummy_scales", False):
        return

    @wraps(original)
    def process_shared(self: Any, layer: Any) -> None:
        from vllm.config import get_current_vllm_config

        is_start = self.moe_kernel is None
        if is_start and get_current_vllm_config().load_config.load_format == "dummy":
            of_gate_and_up = layer.w13_weight_global_scale.data
            of_gate_and_up[:, 1:] = of_gate_and_up[:, :1]
        original(self, layer)

    process_shared.shares_dummy_scales = True  # type: ignore[attr-defined]
    owner.process_weights_after_loading = process_shared


def require_reloadable(model: "nn.Module") -> None:
    """ValueError naming a layer of these kernels whose weights no sync can replace."""
    for name, module in model.named_modules():
        kernel = type(getattr(getattr(module, "scheme", None), "kernel", None)).__name__
        if kernel == LINEAR_CLASSES[VLLM_HUMMING] and getattr(module, "bias", None) is not None:
            raise ValueError(f"{name}: a bias, which {kernel} cannot reload: serve it by marlin")
        method: Any = getattr(module, "quant_method", None)
        experts = getattr(getattr(method, "experts_cls", None), "__name__", "")
        scale: Any = getattr(module, "w13_weight_scale_2", None)
        if experts == EXPERTS_CLASSES[VLLM_HUMMING] and scale.ndim == 2:
            raise ValueError(
                f"{name}: gate and up of an expert came with two global scales, syncs send one, "
                f"and {experts} cannot reload that: start with load_format='dummy', or serve it "
                "by marlin"
            )
