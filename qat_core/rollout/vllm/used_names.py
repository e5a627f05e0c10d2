"""Every name of vLLM's used here that it does not document as an extension point.

A contract test looks each one up in the vLLM that is installed: a new version fails there, by name.
"""

from typing import NamedTuple


class UsedName(NamedTuple):
    """One name.

    Attributes:
        module: below `vllm`.
        name: in the module, perhaps `Class.attribute`.
        purpose: what it is used for.
        since: the first vLLM version that has it, and needs it; "" for all.
        until: the vLLM version that makes it unneeded; "" where none is known.
    """

    module: str
    name: str
    purpose: str
    since: str = ""
    until: str = ""


_RELOAD = "model_executor.model_loader.reload"
_EXPERTS = "model_executor.layers.fused_moe"
_TENSORS = "model_executor.layers.quantization.compressed_tensors.compressed_tensors"
_NVFP4_EXPERTS = (
    "model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
    ".compressed_tensors_moe_w4a4_nvfp4"
)
_MODELOPT = "model_executor.layers.quantization.modelopt"
_MARLIN = "model_executor.layers.quantization.utils.marlin_utils_fp4"

USED_NAMES = (
    UsedName(_RELOAD, "initialize_layerwise_reload", "weights replaced in place"),
    UsedName(_RELOAD, "finalize_layerwise_reload", "the same"),
    UsedName(f"{_RELOAD}.layerwise", "get_layerwise_info", "what a layer takes and still lacks"),
    UsedName(f"{_RELOAD}.layerwise", "_place_kernel_tensors", "embeddings without a copy"),
    UsedName(
        "model_executor.kernels.linear.nvfp4.marlin",
        "MarlinNvFp4LinearKernel.process_weights_after_loading",
        "lock array kept in place for CUDA graphs",
        until="0.28",
    ),
    UsedName(
        _NVFP4_EXPERTS,
        "CompressedTensorsW4A4Nvfp4MoEMethod.process_weights_after_loading",
        "lock array and global scales kept in place for CUDA graphs",
        until="0.28",
    ),
    UsedName(
        _EXPERTS,
        "RoutedExperts._map_global_expert_id_to_local_expert_id",
        "which experts an expert parallel rank has",
    ),
    UsedName(f"{_EXPERTS}.config", "FusedMoEParallelConfig", "its tp_rank, tp_size and ep_size"),
    UsedName(
        f"{_EXPERTS}.unquantized_fused_moe_method",
        "UnquantizedFusedMoEMethod.process_weights_after_loading",
        "experts in BF16 on a CPU, whose kernel is made only once",
    ),
    UsedName(
        f"{_EXPERTS}.experts.cpu_moe",
        "CPUUnquantizedExperts._select_experts",
        "routed experts from a CPU's kernels",
        until="0.30",
    ),
    UsedName(
        f"{_EXPERTS}.experts.cpu_moe",
        "CPUUnquantizedExperts.set_capture_fn",
        "the same, after reloads too",
        until="0.30",
    ),
    UsedName(
        f"{_EXPERTS}.experts.cpu_moe",
        "CPUUnquantizedExperts.supports_routing_replay_capture",
        "the same; `reports_routes` on this class is a mark of ours",
        until="0.30",
    ),
    UsedName(
        "model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4",
        "init_nvfp4_linear_kernel",
        "Humming in place of Marlin",
        until="0.28",
    ),
    UsedName(
        "model_executor.kernels.linear.nvfp4.base", "NvFp4LinearKernel", "the same", until="0.28"
    ),
    UsedName(
        f"{_EXPERTS}.oracle.nvfp4", "backend_to_kernel_cls", "the same, for experts", until="0.28"
    ),
    UsedName(f"{_EXPERTS}.utils", "_resize_cache", "the same, for experts", until="0.28"),
    UsedName(_TENSORS, "CompressedTensorsConfig._get_scheme_from_parts", "W4A16 on a CPU"),
    UsedName(_TENSORS, "CompressedTensorsConfig._is_nvfp4_format", "the same"),
    UsedName(_TENSORS, "CompressedTensorsConfig.get_scheme_dict", "the same, for experts"),
    UsedName(_TENSORS, "CompressedTensorsConfig._add_fused_moe_to_target_scheme_map", "the same"),
    UsedName(_MODELOPT, "ModelOptNvFp4Config.is_layer_excluded", "ModelOpt's W4A16 on a CPU"),
    UsedName(_MODELOPT, "ModelOptNvFp4Config.FusedMoEMethodCls", "the same, for experts"),
    UsedName(
        "model_executor.layers.rotary_embedding.base",
        "RotaryEmbedding.forward_cpu",
        "strided queries rotated right on a CPU",
    ),
    UsedName(
        "v1.engine.core_client",
        "InprocClient",
        "its `_finalizer`, which ends the process groups of engines that still run",
        since="0.31",
    ),
    UsedName(
        f"{_EXPERTS}.oracle.nvfp4",
        "prepare_nvfp4_moe_layer_for_marlin",
        "experts repacked in one call and less memory",
    ),
    UsedName("_custom_ops", "gptq_marlin_repack", "the same"),
    UsedName(_MARLIN, "_nvfp4_compute_scale_factor", "the same"),
    UsedName(_MARLIN, "marlin_permute_scales", "the same"),
    UsedName(_MARLIN, "nvfp4_marlin_process_scales", "the same"),
    UsedName(_MARLIN, "nvfp4_marlin_process_global_scale", "the same"),
)
