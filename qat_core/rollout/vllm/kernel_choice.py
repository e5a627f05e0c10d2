"""How vLLM 0.24's choice of kernels for NVFP4 W4A16 is replaced; loaded by the plugin alone."""

import os
from typing import Any


def require_vllm(asked: str, version: str) -> None:
    """Sets up vLLM for another choice.

    Raises:
        ValueError: naming what asked for it, for another vLLM.
    """
    if not version.startswith("0.24."):
        raise ValueError(f"{asked}: made for vLLM 0.24, not {version}: unset it")
    # Compiled models are cached by settings that this choice is not among: vLLM would run a graph
    # of Marlin's kernels on these weights. Its other cache goes by the code that was compiled.
    os.environ["VLLM_USE_AOT_COMPILE"] = "0"


def use_for_linear(kernel: Any) -> None:
    """Make compressed-tensors' W4A16 linear layers use this class; a second call does nothing."""
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w4a4_nvfp4 as scheme,
    )

    vllms_choice = scheme.init_nvfp4_linear_kernel
    if hasattr(vllms_choice, "replaced_by_qat_core"):
        return

    def choose(use_a16: bool = False) -> Any:
        return kernel(NvFp4LinearLayerConfig()) if use_a16 else vllms_choice(use_a16)

    choose.replaced_by_qat_core = True  # type: ignore[attr-defined]
    scheme.init_nvfp4_linear_kernel = choose
