"""Every name of vLLM, verl and Hydra used here that they do not document as an extension point.

A contract test looks each one up in what is installed: a new version fails there, by name.
"""

from typing import NamedTuple


class UsedName(NamedTuple):
    """One name.

    Attributes:
        module: whole path.
        name: in the module, perhaps `Class.attribute`.
        purpose: what it is used for.
        instead: what would make it unneeded, where it is known and no version has it.
        since: the first version that has it, and needs it; "" for all.
        until: the first version with which nothing uses it: what it did came into vLLM, or what
            needs it is not served there; "" where none is known.
    """

    module: str
    name: str
    purpose: str
    instead: str = ""
    since: str = ""
    until: str = ""

    @property
    def package(self) -> str:
        """Whose it is."""
        return self.module.partition(".")[0]


def _for(
    purpose: str, *names: str, instead: str = "", since: str = "", until: str = ""
) -> tuple[UsedName, ...]:
    """Names, each after its module and a colon, that serve one purpose."""
    return tuple(
        UsedName(module, name, purpose, instead, since, until)
        for module, name in (each.split(":") for each in names)
    )


_LAYERS = "vllm.model_executor.layers"
_KERNELS = "vllm.model_executor.kernels.linear.nvfp4"
_MODELS = "vllm.model_executor.models"
_RELOAD = "vllm.model_executor.model_loader.reload"
_EXPERTS = f"{_LAYERS}.fused_moe"
_TENSORS = f"{_LAYERS}.quantization.compressed_tensors"
_CONFIG = f"{_TENSORS}.compressed_tensors:CompressedTensorsConfig"
_NVFP4_EXPERTS = f"{_TENSORS}.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4"
_MODELOPT = f"{_LAYERS}.quantization.modelopt:ModelOptNvFp4Config"
_MARLIN = f"{_LAYERS}.quantization.utils.marlin_utils_fp4"
_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_VLLM = "verl.workers.rollout.vllm_rollout"
_PROCESS = "process_weights_after_loading"

# exact mode: proven with 0.24 alone
_EXACT = {
    "a residual's norm with one block size": (f"{_LAYERS}.layernorm:rms_norm_batch_invariant",),
    "cuBLAS in place of Triton": (
        f"{_LAYERS}.linear:UnquantizedLinearMethod.apply",
        f"{_LAYERS}.vocab_parallel_embedding:linear_batch_invariant",
    ),
    "a single row lies as many": (f"{_LAYERS}.logits_processor:LogitsProcessor._get_logits",),
    "graphs with keys for their queries": (
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._warmup_and_capture",
        "vllm.v1.worker.gpu.cudagraph_utils:prepare_inputs_to_capture",
    ),
    "the trainer's norm": (f"{_LAYERS}.batch_invariant:rms_norm_batch_invariant",),
    "the trainer's log-probs": (
        f"{_LAYERS}.batch_invariant:log_softmax",  # of model runner 1
        "vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs",
    ),
    "the trainer's sum over experts": (f"{_EXPERTS}.moe_fused_mul_sum:moe_fused_mul_sum",),
    "BF16 experts rounded one by one": (
        f"{_EXPERTS}.oracle.unquantized:backend_to_kernel_cls",
        f"{_EXPERTS}.experts.triton_moe:TritonExperts",
    ),
    "one size of blocks": ("vllm.v1.attention.backends.flash_attn:flash_attn_varlen_func",),
    "SwiGLU by more than a block a token": (
        f"{_LAYERS}.activation:SiluAndMul.forward_cuda",
        f"{_EXPERTS}.activation:MoEActivation.SILU",
    ),
    "heads normed and rotated at once": (
        "vllm._custom_ops:fused_qk_norm_rope",
        f"{_MODELS}.qwen3:Qwen3Attention.forward",
        f"{_MODELS}.qwen3_moe:Qwen3MoeAttention.forward",
        f"{_LAYERS}.rotary_embedding.base:RotaryEmbeddingBase._match_cos_sin_cache_dtype",
    ),
    "the trainer's attention": ("vllm.vllm_flash_attn:flash_attn_varlen_func",),
}

_OF_VLLM = (
    *_for(
        "weights replaced in place",
        f"{_RELOAD}:initialize_layerwise_reload",
        f"{_RELOAD}:finalize_layerwise_reload",
    ),
    *_for("what a layer takes and still lacks", f"{_RELOAD}.layerwise:get_layerwise_info"),
    *_for("embeddings without a copy", f"{_RELOAD}.layerwise:_place_kernel_tensors"),
    *_for(
        "lock array, and global scales of experts, kept in place for CUDA graphs",
        f"{_KERNELS}.marlin:MarlinNvFp4LinearKernel.{_PROCESS}",
        f"{_NVFP4_EXPERTS}:CompressedTensorsW4A4Nvfp4MoEMethod.{_PROCESS}",
        until="0.28",
    ),
    *_for(
        "vLLM's own Humming through a reload: its locks in place, one scale of gate and up",
        f"{_KERNELS}.humming:HummingNvFp4LinearKernel.{_PROCESS}",
        f"{_NVFP4_EXPERTS}:CompressedTensorsW4A4Nvfp4MoEMethod.{_PROCESS}",
        since="0.33",
    ),
    *_for(
        "its tiles, as in batch-invariant mode",
        f"{_LAYERS}.quantization.utils.humming.linear:envs",
        f"{_EXPERTS}.experts.fused_humming_moe:envs",
        since="0.33",
    ),
    *_for(
        "whether its locks serve all layers",
        f"{_LAYERS}.quantization.utils.marlin_utils:get_marlin_workspace",
        since="0.33",
    ),
    *_for(
        "which experts an expert parallel rank has",
        f"{_EXPERTS}:RoutedExperts._map_global_expert_id_to_local_expert_id",
    ),
    *_for("its tp_rank, tp_size and ep_size", f"{_EXPERTS}.config:FusedMoEParallelConfig"),
    *_for(
        "experts in BF16 on a CPU, whose kernel is made only once",
        f"{_EXPERTS}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.{_PROCESS}",
    ),
    *_for(
        "routed experts from a CPU's kernels; `reports_routes` on their class is a mark of ours",
        f"{_EXPERTS}.experts.cpu_moe:CPUUnquantizedExperts._select_experts",
        f"{_EXPERTS}.experts.cpu_moe:CPUUnquantizedExperts.set_capture_fn",
        f"{_EXPERTS}.experts.cpu_moe:CPUUnquantizedExperts.supports_routing_replay_capture",
        since="0.28",
        until="0.30",
    ),
    *_for(
        "Humming in place of Marlin, for experts too",
        f"{_TENSORS}.schemes.compressed_tensors_w4a4_nvfp4:init_nvfp4_linear_kernel",
        f"{_KERNELS}.base:NvFp4LinearKernel",
        f"{_EXPERTS}.oracle.nvfp4:backend_to_kernel_cls",
        f"{_EXPERTS}.utils:_resize_cache",
    ),
    *_for(
        "W4A16 on a CPU, for experts too",
        f"{_CONFIG}._get_scheme_from_parts",
        f"{_CONFIG}._is_nvfp4_format",
        f"{_CONFIG}.get_scheme_dict",
        f"{_CONFIG}._add_fused_moe_to_target_scheme_map",
    ),
    *_for(
        "ModelOpt's W4A16 on a CPU, for experts too",
        f"{_MODELOPT}.is_layer_excluded",
        f"{_MODELOPT}.FusedMoEMethodCls",
    ),
    *_for(
        "strided queries rotated right on a CPU",
        f"{_LAYERS}.rotary_embedding.base:RotaryEmbedding.forward_cpu",
    ),
    *_for(
        "sliding windows on a CPU with AMX",
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend.get_supported_kernel_block_sizes",
    ),
    *_for(
        "its `_finalizer`, which ends the process groups of engines that still run",
        "vllm.v1.engine.core_client:InprocClient",
        since="0.31",
    ),
    *_for(
        "experts repacked in one call and less memory",
        f"{_EXPERTS}.oracle.nvfp4:prepare_nvfp4_moe_layer_for_marlin",
        "vllm._custom_ops:gptq_marlin_repack",
        f"{_MARLIN}:_nvfp4_compute_scale_factor",
        f"{_MARLIN}:marlin_permute_scales",
    ),
    *_for(
        "linear layers of few rows",
        f"{_MARLIN}:apply_fp4_marlin_linear",
        f"{_MARLIN}:nvfp4_marlin_process_scales",
        f"{_MARLIN}:nvfp4_marlin_process_global_scale",
    ),
    *(name for purpose, names in _EXACT.items() for name in _for(purpose, *names, until="0.28")),
)

_OF_VERL = (
    *_for(
        "adapter with own sockets, and their receiving end",
        "verl.workers.rollout.base:_ROLLOUT_REGISTRY",
        f"{_VLLM}.utils:vLLMColocateWorkerExtension._get_zmq_handle",
        instead="sockets named by Ray cluster",
    ),
    *_for(
        "weights into vLLM's layer-wise reload",
        f"{_VLLM}.bucketed_weight_transfer:BucketedWeightReceiver.receive_weights",
        instead="verl's own use of that reload",
    ),
    *_for(
        "the model is prepared before it is sharded",
        f"{_ENGINE}:FSDPEngineWithLMHead._build_module",
        instead="a hook for it",
    ),
    *_for(
        "rotary embeddings are not rounded to BF16",
        f"{_ENGINE}:FSDPEngine._build_module",
        instead="a cast of parameters alone",
    ),
    *_for(
        "routes replayed in a micro-batch, and no more after a batch",
        f"{_ENGINE}:FSDPEngineWithLMHead.prepare_model_inputs",
        f"{_ENGINE}:FSDPEngineWithLMHead.forward_backward_batch",
        instead="routing replay with FSDP2",
    ),
    *_for(
        "packed shards dropped with an offload",
        f"{_ENGINE}:FSDPEngineWithLMHead.to",
        instead="a hook",
    ),
    *_for(
        "reference policies on a CPU",
        f"{_ENGINE}:CPUOffloadPolicy",
        instead="one that needs no GPU",
    ),
    *_for(
        "weights saved from the host's memory stay as they were",
        "verl.utils.fsdp_utils:fsdp2_sharded_save_to_cpu",
        instead="a copy in place of `cpu()`",
    ),
    *_for(
        "saved weights are restored into shards",
        "verl.utils.fsdp_utils:fsdp2_sharded_load_from_cpu",
        instead="a reshard before it",
    ),
    *_for(
        "syncs between processes on a CPU",
        "verl.checkpoint_engine.base:split_weight_chunks",
        "verl.checkpoint_engine.base:merge_weight_chunks",
        instead="a transport of verl's that needs no GPU",
    ),
    *_for(
        "an engine for fsdp2 of its own, by vendor",
        "verl.workers.engine.base:EngineRegistry.register",
        instead="verl choosing engines by their settings",
    ),
    *_for(
        "gloo named once on a CPU",
        "verl.utils.distributed:initialize_global_process_group_ray",
        instead="verl naming each backend once",
    ),
    *_for(
        "log-probs of many tokens at once",
        "verl.utils.torch_functional:logprobs_from_logits_v2",
        instead="no loop over packed tokens",
    ),
    *_for(
        "a shorter poll interval",
        "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.sample",
        instead="a key for poll_interval",
    ),
    *_for(
        "the actor's model before Ray starts",
        "verl.utils.model:get_hf_auto_model_class",
        "verl.utils.model:update_model_config",
        instead="a check of the model by verl",
    ),
    *_for("log-probs with vLLM's bits", f"{_ENGINE}:logprobs_from_logits", instead="verl 8026"),
    *_for(
        "the count of what differs",
        "verl.utils.debug.metrics:calculate_debug_metrics",
        "verl.utils.tracking:Tracking.log",
        instead="verl 8025",
    ),
)

_OF_HYDRA = _for(
    "order of files, and what a file says",
    "hydra._internal.defaults_list:create_defaults_list",
    "hydra._internal.config_loader_impl:ConfigLoaderImpl._parse_overrides_and_create_caching_repo",
    "hydra._internal.config_loader_impl:ConfigLoaderImpl._load_single_config",
    instead="an interface that tells which file set a key",
)

USED_NAMES: tuple[UsedName, ...] = (*_OF_VLLM, *_OF_VERL, *_OF_HYDRA)
