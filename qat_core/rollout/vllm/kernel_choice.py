"""Which kernels multiply NVFP4 W4A16: asked for by name, as vLLM's default goes by its version.

vLLM 0.24 to 0.31 multiply by Marlin; from 0.32 on by Humming, on Hopper, whose bits differ.
"""

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from qat_core.rollout.vllm.compat import is_one_of
from qat_core.rollout.vllm.switches import (
    EXPERTS_VARIABLE,
    HUMMING,
    LINEAR_VARIABLE,
    MARLIN,
    MARLIN_UNPACK,
    VLLM_HUMMING,
    is_exact,
    kernel_named_by,
)

if TYPE_CHECKING:
    from torch import nn

LINEAR_CLASSES = {
    MARLIN: "MarlinNvFp4LinearKernel",
    MARLIN_UNPACK: "MarlinUnpackKernel",
    HUMMING: "HummingLinearKernel",
    VLLM_HUMMING: "HummingNvFp4LinearKernel",
}
CPU_CLASS = "_NoKernel"  # of `cpu/`
EXPERTS_CLASSES = {
    MARLIN: "MarlinExperts",
    HUMMING: "HummingExperts",
    VLLM_HUMMING: "HummingIndexedExperts",
}


def settings_by_name(
    experts: Collection[str],
    packed: Collection[str],
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Settings of `vllm.LLM` that name the kernels of a GPU; this project's stand in for Marlin.

    Of experts vLLM takes one name for all layers: where some are packed and some are not, none
    chooses both kernels, and `require_asked` alone is left.

    Args:
        experts: all weights of experts.
        packed: all weights in NVFP4.
        environment: of vLLM's processes.
    """
    named = {}
    if set(packed) - set(experts):
        named["linear_backend"] = _backend(LINEAR_VARIABLE, environment)
    if experts and set(experts) <= set(packed):
        named["moe_backend"] = _backend(EXPERTS_VARIABLE, environment)
    elif experts and not set(experts) & set(packed):
        named["moe_backend"] = "triton"
    return named


def _backend(variable: str, environment: Mapping[str, str]) -> str:
    """vLLM's name of it."""
    return "humming" if kernel_named_by(variable, environment) == VLLM_HUMMING else "marlin"


def require_asked(model: "nn.Module") -> None:
    """ValueError naming a layer in NVFP4 that another kernel multiplies than was asked for."""
    linear, experts = kernel_named_by(LINEAR_VARIABLE), kernel_named_by(EXPERTS_VARIABLE)
    if is_exact():
        linear = experts = HUMMING
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        scheme: Any = getattr(module, "scheme", None)
        if hasattr(method, "nvfp4_backend"):
            found, asked = method.experts_cls.__name__, EXPERTS_CLASSES[experts]
        elif getattr(scheme, "use_a16", False):
            found, asked = type(scheme.kernel).__name__, LINEAR_CLASSES[linear]
        else:
            continue
        if found in (asked, CPU_CLASS):
            continue
        fix = "leave its settings linear_backend and moe_backend to this project"
        if found == EXPERTS_CLASSES[VLLM_HUMMING]:  # chosen where some experts are not packed
            fix += f", or ask for it by {EXPERTS_VARIABLE}={VLLM_HUMMING}"
        raise ValueError(f"vLLM multiplies {name} by {found}, not by {asked}: {fix}")


def require_vllm(asked: str, version: str, proven: Collection[str], instead: str) -> None:
    """Sets up vLLM for another choice.

    Raises:
        ValueError: naming what asked for it, for another vLLM.
    """
    if not is_one_of(version, proven):
        raise ValueError(f"{asked}: made for vLLM {', '.join(proven)}, not {version}: {instead}")
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
