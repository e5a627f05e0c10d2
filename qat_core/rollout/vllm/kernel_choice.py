"""Which kernels multiply NVFP4 W4A16: asked for by name, as vLLM's default goes by its version.

vLLM 0.24 to 0.31 multiply by Marlin; from 0.32 on by Humming, on Hopper, whose bits differ.
"""

import json
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
    OWN_HUMMINGS,
    VLLM_HUMMING,
    VLLM_HUMMING_INVARIANT,
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
    VLLM_HUMMING_INVARIANT: "HummingNvFp4LinearKernel, batch-invariant",
}
CPU_CLASS = "_NoKernel"  # of `cpu/`
EXPERTS_CLASSES = {
    MARLIN: "MarlinExperts",
    HUMMING: "HummingExperts",
    VLLM_HUMMING: "HummingIndexedExperts",
    VLLM_HUMMING_INVARIANT: "HummingIndexedExperts, batch-invariant",
}
ATOMIC_VARIABLE = "VLLM_MARLIN_USE_ATOMIC_ADD"  # vLLM's


def settings_by_name(
    experts: Collection[str],
    packed: Collection[str],
    environment: Mapping[str, str] = os.environ,
    *,
    takes_mixed: bool = False,
) -> dict[str, str]:
    """Settings of `vllm.LLM` that name the kernels of a GPU; this project's stand in for Marlin.

    Of experts vLLM takes one name for all layers. Where some are packed and some are not, a version
    that uses it for packed ones alone is told theirs. Others would refuse it for BF16 experts, and
    choose Marlin for packed ones untold.

    Args:
        experts: all weights of experts.
        packed: all weights in NVFP4.
        environment: of vLLM's processes.
        takes_mixed: whether this version leaves BF16 experts to its default, whatever the name.

    Raises:
        ValueError: the environment lets Marlin add in no fixed order.
    """
    named = {}
    if set(packed) - set(experts):
        named["linear_backend"] = _backend(LINEAR_VARIABLE, environment)
    of_both = set(experts) & set(packed)
    if of_both and (takes_mixed or of_both == set(experts)):
        named["moe_backend"] = _backend(EXPERTS_VARIABLE, environment)
    elif experts and not of_both:
        named["moe_backend"] = "triton"
    return named


def _backend(variable: str, environment: Mapping[str, str]) -> str:
    """vLLM's name of it; ValueError where Marlin is to add in no fixed order."""
    if kernel_named_by(variable, environment) in OWN_HUMMINGS:
        return "humming"
    if environment.get(ATOMIC_VARIABLE, "") not in ("", "0"):
        raise ValueError(
            f"{ATOMIC_VARIABLE}: Marlin would add in no fixed order, and bits not repeat; unset it"
        )
    return "marlin"


def require_asked(model: "nn.Module") -> None:
    """ValueError naming a layer in NVFP4 that another kernel multiplies than was asked for."""
    linear, experts = kernel_named_by(LINEAR_VARIABLE), kernel_named_by(EXPERTS_VARIABLE)
    if is_exact():
        linear = experts = HUMMING
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        scheme: Any = getattr(module, "scheme", None)
        if hasattr(method, "nvfp4_backend"):
            served = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
            found, asked = _named(method.experts_cls, served), EXPERTS_CLASSES[experts]
        elif getattr(scheme, "use_a16", False):
            found, asked = _named(type(scheme.kernel), scheme.kernel), LINEAR_CLASSES[linear]
        elif type(kernel := getattr(method, "kernel", None)).__name__ in LINEAR_CLASSES.values():
            # of ModelOpt's form, whose layers keep vLLM's kernels
            found = _named(type(kernel), kernel)
            asked = LINEAR_CLASSES[linear if linear in OWN_HUMMINGS else MARLIN]
        else:
            continue
        if found in (asked, CPU_CLASS):
            continue
        raise ValueError(
            f"vLLM multiplies {name} by {found}, not by {asked}: leave its settings linear_backend "
            "and moe_backend to this project"
        )


def _named(kernel: type, served: Any) -> str:
    """A kernel's class, and whether Humming's tiles are those of its batch-invariant mode."""
    config = getattr(served, "compute_config", None) or {}
    settings = json.loads(config) if isinstance(config, str) else config
    return kernel.__name__ + (", batch-invariant" if settings.get("use_batch_invariant") else "")


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
