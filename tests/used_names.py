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
        until: the version that makes it unneeded; "" where none is known.
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


_RELOAD = "vllm.model_executor.model_loader.reload"
_EXPERTS = "vllm.model_executor.layers.fused_moe"
_TENSORS = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
_NVFP4_EXPERTS = (
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
    ".compressed_tensors_moe_w4a4_nvfp4"
)
_MODELOPT = "vllm.model_executor.layers.quantization.modelopt"
_MARLIN = "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4"
_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_VLLM = "verl.workers.rollout.vllm_rollout"
_ONE_SOCKET = "sockets named by Ray cluster"
_WHICH_FILE = "an interface that tells which file set a key"

_LAYERS = "vllm.model_executor.layers"
_EXACT = (
    (f"{_LAYERS}.layernorm", "rms_norm_batch_invariant", "a residual's norm with one block size"),
    (f"{_LAYERS}.linear", "linear_batch_invariant", "cuBLAS in place of Triton"),
    (f"{_LAYERS}.vocab_parallel_embedding", "linear_batch_invariant", "the same"),
    (f"{_LAYERS}.logits_processor", "LogitsProcessor._get_logits", "a single row lies as many"),
    (f"{_LAYERS}.batch_invariant", "rms_norm_batch_invariant", "the trainer's norm"),
    (f"{_LAYERS}.batch_invariant", "log_softmax", "the trainer's log-probs, model runner 1"),
    (f"{_EXPERTS}.moe_fused_mul_sum", "moe_fused_mul_sum", "the trainer's sum over experts"),
    (f"{_EXPERTS}.oracle.unquantized", "backend_to_kernel_cls", "BF16 experts rounded one by one"),
    (f"{_EXPERTS}.experts.triton_moe", "TritonExperts", "the same"),
    ("vllm.v1.worker.gpu.sample.logprob", "compute_token_logprobs", "the trainer's log-probs"),
    ("vllm.v1.attention.backends.flash_attn", "flash_attn_varlen_func", "one size of blocks"),
    (f"{_LAYERS}.activation", "SiluAndMul.forward_cuda", "SwiGLU by more than a block a token"),
    (f"{_EXPERTS}.activation", "MoEActivation.SILU", "the same for experts"),
    ("vllm._custom_ops", "fused_qk_norm_rope", "heads normed and rotated at once"),
    ("vllm.model_executor.models.qwen3", "Qwen3Attention.forward", "the same"),
    ("vllm.model_executor.models.qwen3_moe", "Qwen3MoeAttention.forward", "the same"),
    (
        f"{_LAYERS}.rotary_embedding.base",
        "RotaryEmbeddingBase._match_cos_sin_cache_dtype",
        "the same",
    ),
    ("vllm.vllm_flash_attn", "flash_attn_varlen_func", "the trainer's attention"),
)

USED_NAMES = (
    UsedName(_RELOAD, "initialize_layerwise_reload", "weights replaced in place"),
    UsedName(_RELOAD, "finalize_layerwise_reload", "the same"),
    UsedName(f"{_RELOAD}.layerwise", "get_layerwise_info", "what a layer takes and still lacks"),
    UsedName(f"{_RELOAD}.layerwise", "_place_kernel_tensors", "embeddings without a copy"),
    UsedName(
        "vllm.model_executor.kernels.linear.nvfp4.marlin",
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
        "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4",
        "init_nvfp4_linear_kernel",
        "Humming in place of Marlin",
    ),
    UsedName(
        "vllm.model_executor.kernels.linear.nvfp4.base",
        "NvFp4LinearKernel",
        "the same",
    ),
    UsedName(f"{_EXPERTS}.oracle.nvfp4", "backend_to_kernel_cls", "the same, for experts"),
    UsedName(f"{_EXPERTS}.utils", "_resize_cache", "the same, for experts"),
    UsedName(_TENSORS, "CompressedTensorsConfig._get_scheme_from_parts", "W4A16 on a CPU"),
    UsedName(_TENSORS, "CompressedTensorsConfig._is_nvfp4_format", "the same"),
    UsedName(_TENSORS, "CompressedTensorsConfig.get_scheme_dict", "the same, for experts"),
    UsedName(_TENSORS, "CompressedTensorsConfig._add_fused_moe_to_target_scheme_map", "the same"),
    UsedName(_MODELOPT, "ModelOptNvFp4Config.is_layer_excluded", "ModelOpt's W4A16 on a CPU"),
    UsedName(_MODELOPT, "ModelOptNvFp4Config.FusedMoEMethodCls", "the same, for experts"),
    UsedName(
        "vllm.model_executor.layers.rotary_embedding.base",
        "RotaryEmbedding.forward_cpu",
        "strided queries rotated right on a CPU",
    ),
    UsedName(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackend.get_supported_kernel_block_sizes",
        "sliding windows on a CPU with AMX",
    ),
    UsedName(
        "vllm.v1.engine.core_client",
        "InprocClient",
        "its `_finalizer`, which ends the process groups of engines that still run",
        since="0.31",
    ),
    UsedName(
        f"{_EXPERTS}.oracle.nvfp4",
        "prepare_nvfp4_moe_layer_for_marlin",
        "experts repacked in one call and less memory",
    ),
    UsedName("vllm._custom_ops", "gptq_marlin_repack", "the same"),
    UsedName(_MARLIN, "_nvfp4_compute_scale_factor", "the same"),
    UsedName(_MARLIN, "marlin_permute_scales", "the same"),
    UsedName(_MARLIN, "apply_fp4_marlin_linear", "linear layers of few rows"),
    UsedName(_MARLIN, "nvfp4_marlin_process_scales", "the same"),
    UsedName(_MARLIN, "nvfp4_marlin_process_global_scale", "the same"),
    UsedName(
        "verl.workers.rollout.base", "_ROLLOUT_REGISTRY", "adapter with own sockets", _ONE_SOCKET
    ),
    UsedName(
        f"{_VLLM}.utils",
        "vLLMColocateWorkerExtension._get_zmq_handle",
        "the receiving end of these sockets",
        _ONE_SOCKET,
    ),
    UsedName(
        f"{_VLLM}.bucketed_weight_transfer",
        "BucketedWeightReceiver.receive_weights",
        "weights into vLLM's layer-wise reload",
        "verl's own use of that reload",
    ),
    UsedName(
        _ENGINE,
        "FSDPEngineWithLMHead._build_module",
        "the model is prepared before it is sharded",
        "a hook for it",
    ),
    UsedName(
        _ENGINE,
        "FSDPEngine._build_module",
        "rotary embeddings are not rounded to BF16",
        "a cast of parameters alone",
    ),
    UsedName(
        _ENGINE,
        "FSDPEngineWithLMHead.prepare_model_inputs",
        "routes replayed in a micro-batch",
        "routing replay with FSDP2",
    ),
    UsedName(
        _ENGINE,
        "FSDPEngineWithLMHead.forward_backward_batch",
        "the replay ends with a batch",
        "routing replay with FSDP2",
    ),
    UsedName(_ENGINE, "FSDPEngineWithLMHead.to", "packed shards dropped with an offload", "a hook"),
    UsedName(_ENGINE, "CPUOffloadPolicy", "reference policies on a CPU", "one that needs no GPU"),
    UsedName(
        "verl.utils.fsdp_utils",
        "fsdp2_sharded_save_to_cpu",
        "weights saved from the host's memory stay as they were",
        "a copy in place of `cpu()`",
    ),
    UsedName(
        "verl.utils.fsdp_utils",
        "fsdp2_sharded_load_from_cpu",
        "saved weights are restored into shards",
        "a reshard before it",
    ),
    UsedName(
        "verl.checkpoint_engine.base",
        "split_weight_chunks",
        "syncs between processes on a CPU",
        "a transport of verl's that needs no GPU",
    ),
    UsedName("verl.checkpoint_engine.base", "merge_weight_chunks", "the same", "the same"),
    UsedName(
        "verl.workers.engine.base",
        "EngineRegistry.register",
        "an engine for fsdp2 of its own, by vendor",
        "verl choosing engines by their settings",
    ),
    UsedName(
        "verl.utils.distributed",
        "initialize_global_process_group_ray",
        "gloo named once on a CPU",
        "verl naming each backend once",
    ),
    UsedName(
        "verl.utils.torch_functional",
        "logprobs_from_logits_v2",
        "log-probs of many tokens at once",
        "no loop over packed tokens",
    ),
    UsedName(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBuffer.sample",
        "a shorter poll interval",
        "a key for poll_interval",
    ),
    UsedName(
        "verl.utils.model",
        "get_hf_auto_model_class",
        "the actor's model before Ray starts",
        "a check of the model by verl",
    ),
    UsedName("verl.utils.model", "update_model_config", "the same", "the same"),
    UsedName(
        "hydra._internal.defaults_list", "create_defaults_list", "order of files", _WHICH_FILE
    ),
    UsedName(
        "hydra._internal.config_loader_impl",
        "ConfigLoaderImpl._parse_overrides_and_create_caching_repo",
        "the same",
        _WHICH_FILE,
    ),
    UsedName(
        "hydra._internal.config_loader_impl",
        "ConfigLoaderImpl._load_single_config",
        "what a file says",
        _WHICH_FILE,
    ),
    UsedName(_ENGINE, "logprobs_from_logits", "log-probs with vLLM's bits", "verl 8026"),
    UsedName(
        "verl.utils.debug.metrics",
        "calculate_debug_metrics",
        "the count of what differs",
        "verl 8025",
    ),
    *(UsedName(*used, until="0.28") for used in _EXACT),  # exact mode: proven with 0.24 alone
)
