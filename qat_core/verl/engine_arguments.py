"""Which of vLLM's own arguments `rollout.engine_kwargs.vllm` may hold.

verl hands them over after most of its own (`vllm_async_server.py`): one that verl has a key for
overrides that key, and so goes around the rules for it, or is overridden. vLLM takes a name with
hyphens and with underscores, and after `no_`.
"""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from qat_core.verl.rules import MODEL, ROLLOUT, VLLM, is_not_set

_SAME_NAME = (
    *("data_parallel_size", "disable_log_stats", "dtype", "enable_chunked_prefill"),
    *("enable_prefix_caching", "enable_sleep_mode", "enforce_eager", "gpu_memory_utilization"),
    *("load_format", "logprobs_mode", "max_model_len", "max_num_batched_tokens", "max_num_seqs"),
    *("scheduling_policy", "seed"),
)
_VERLS_KEYS = {
    **{name: f"{ROLLOUT}.{name}" for name in _SAME_NAME},
    "enable_expert_parallel": f"{ROLLOUT}.expert_parallel_size",
    "model": f"{MODEL}.path",
    "override_generation_config": f"{ROLLOUT}.temperature, top_p and top_k",
    "pipeline_parallel_size": f"{ROLLOUT}.pipeline_model_parallel_size",
    "tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
    "trust_remote_code": f"{MODEL}.trust_remote_code",
}
# their rules are those of one spelling
_RULED = ("hf_overrides", "quantization", "speculative_config", "worker_extension_cls")
# enable_eplb moves experts: a sync would write them to their first places
_UNTRIED = (
    *("calculate_kv_scales", "cpu_offload_gb", "enable_eplb", "kv_cache_dtype", "linear_backend"),
    *("moe_backend", "offload_group_size"),
)


def require_arguments(config: DictConfig) -> None:
    """ValueError with a line for each argument that is refused."""
    given = OmegaConf.select(config, VLLM) or {}
    refused = [
        f"{VLLM}.{key}: {value}: {fix}"
        for key, value in given.items()
        if value is not None  # verl drops these
        for fix in _fixes(str(key), value)
    ]
    if refused:
        raise ValueError("\n".join(refused))


def _fixes(key: str, value: object) -> Iterator[str]:
    name = key.replace("-", "_").removeprefix("no_")
    if name in _VERLS_KEYS:
        yield f"verl has a key for it; remove it, and set {_VERLS_KEYS[name]}"
    elif name in _RULED and name != key:
        yield f"write {name}"
    elif name == "enable_lora" and not is_not_set(value):
        yield "LoRA adapters are not synced; remove the key"
    elif name == "quantization_config":
        yield "verl's keys say what is quantized; remove the key"
    elif name in _UNTRIED and not is_not_set(value) and value != "auto":
        yield "never tried with these syncs; remove the key"
