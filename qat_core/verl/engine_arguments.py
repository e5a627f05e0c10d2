"""Which of vLLM's own arguments `rollout.engine_kwargs.vllm` may hold.

verl hands them over after most of its own (`vllm_async_server.py`): one that verl has a key for
overrides that key, and so goes around the rules for it, or is overridden. vLLM takes a name with
hyphens and with underscores, after `no_`, shortened as long as no other name begins like it, and
with a dot before a key of its section. verl writes values behind names, and of a list each by
itself: a text that begins with a hyphen is one more name to vLLM.
"""

import re
from collections.abc import Iterator, Mapping

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from qat_core.rollout.vllm.switches import MARLIN
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
_RULED = (
    *("hf_overrides", "linear_backend", "moe_backend", "quantization", "speculative_config"),
    "worker_extension_cls",
)
# enable_eplb moves experts: a sync would write them to their first places
_UNTRIED = (
    *("calculate_kv_scales", "cpu_offload_gb", "enable_eplb", "kernel_config", "kv_cache_dtype"),
    *("model_impl", "offload_group_size"),
)
# vLLM makes `speculative_config` of the first three
_REMOVED = {
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), "draft models are not synced"),
    "config": "a file's keys are not checked, write them here",
    "quantization_config": "verl's keys say what is quantized",
}
_ALL = sorted({*_VERLS_KEYS, *_RULED, *_UNTRIED, *_REMOVED, "enable_lora"})


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


def name_kernels(config: DictConfig, kernels: Mapping[str, str]) -> None:
    """Asks vLLM for kernels by name; ValueError for another one that is given."""
    for key in ("linear_backend", "moe_backend"):
        given = OmegaConf.select(config, f"{VLLM}.{key}")
        if given is not None and str(given).lower() not in ("auto", kernels.get(key, MARLIN)):
            raise ValueError(f"{VLLM}.{key}: {given}: this project names kernels; remove the key")
    with open_dict(config):
        for key, name in kernels.items():
            OmegaConf.update(config, f"{VLLM}.{key}", name, force_add=True)


def _fixes(key: str, value: object) -> Iterator[str]:
    name = key.replace("-", "_").removeprefix("no_")
    if not re.fullmatch(r"\w+", name):
        yield "no name; write a key of a section into the section"
    elif name in _VERLS_KEYS:
        yield f"verl has a key for it; remove it, and set {_VERLS_KEYS[name]}"
    elif name in _RULED:
        if name != key:
            yield f"write {name}"
    elif name in _REMOVED:
        yield f"{_REMOVED[name]}; remove the key"
    elif name == "enable_lora":
        if not is_not_set(value):
            yield "LoRA adapters are not synced; remove the key"
    elif name in _UNTRIED:
        if not is_not_set(value) and value != "auto":
            yield "never tried with these syncs; remove the key"
    elif longer := [ruled for ruled in _ALL if ruled.startswith(name)]:
        yield f"short for {' or '.join(longer)} to vLLM; write its name in full"
    else:
        values = value if isinstance(value, ListConfig) else [value]
        if any(isinstance(it, str) and it.startswith("-") for it in values):
            yield "a text with a hyphen first is another argument to vLLM; write that as a key"
