"""vLLM plugin (`vllm.general_plugins`): what vLLM itself does not run in NVFP4 W4A16, or slowly.

vLLM runs W4A16 with the Marlin kernel only and refuses it on a CPU. With this plugin the same
checkpoints and weight syncs run there in BF16, unpacked when they arrive, and experts tell their
routes. On CUDA nothing changes unless `QAT_CORE_LINEAR_KERNEL` asks for other kernels of linear
layers (of the compressed-tensors form, which syncs have; those of a ModelOpt checkpoint keep
Marlin), or `QAT_CORE_EXPERTS_KERNEL` for other ones of experts. The first engine of a process
decides for all of them.
"""

import os
from collections.abc import Callable
from functools import partial

from qat_core.rollout.vllm.kernel_choice import require_vllm, use_for_linear

# torch.compile would go past batch-invariant norms; prefill varies too much for graphs
EXACT_COMPILATION = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
LINEAR_VARIABLE = "QAT_CORE_LINEAR_KERNEL"
EXPERTS_VARIABLE = "QAT_CORE_EXPERTS_KERNEL"
IN_PLACE_VARIABLE = "QAT_CORE_IN_PLACE_SYNC"  # see `in_place.py`
EXACT_VARIABLE = "QAT_CORE_EXACT"  # see `exact.py`; set by `VllmEngine` and by `+exact=on`
COVERAGE_VARIABLE = "QAT_CORE_COVERAGE"  # where verl's engine writes what it packs
MARLIN, MARLIN_UNPACK, HUMMING = "marlin", "marlin-unpack", "humming"
KERNELS = {  # the first is vLLM's own choice
    LINEAR_VARIABLE: (MARLIN, MARLIN_UNPACK, HUMMING),
    EXPERTS_VARIABLE: (MARLIN, HUMMING),
}

_chosen: dict[str, str] = {}  # by variable, of the process's first engine


def register() -> None:
    """Called by every vLLM process at its start.

    Raises:
        ValueError: the environment asks for a kernel that is not known or cannot run here, or for
            another one than an engine of this process has: what it replaced in vLLM stays. Or see
            `require_known_variables`.
    """
    from vllm.platforms import current_platform

    require_known_variables()
    exact_or_not = _chosen.setdefault(EXACT_VARIABLE, str(is_exact()))
    if exact_or_not != str(is_exact()):
        raise ValueError(f"{EXACT_VARIABLE}: this process has started another engine before")
    if is_exact():
        require_exact()
        from qat_core.rollout.vllm import exact

        exact.install()
        return
    linear = asked_for(LINEAR_VARIABLE)
    if linear == HUMMING:
        from qat_core.rollout.vllm.humming_linear import HummingLinearKernel

        use_for_linear(HummingLinearKernel)
    elif linear == MARLIN_UNPACK:
        from qat_core.rollout.vllm.marlin_linear import MarlinUnpackKernel

        use_for_linear(MarlinUnpackKernel)
    if asked_for(EXPERTS_VARIABLE) == HUMMING:
        from qat_core.rollout.vllm import humming_experts

        humming_experts.install()
    if not current_platform.is_cpu():
        return
    import vllm
    from vllm.model_executor.layers.quantization import register_quantization_config

    from qat_core.bf16_on_cpu import multiply_bf16_in_fp32
    from qat_core.rollout.vllm.cpu import CpuCompressedTensorsConfig
    from qat_core.rollout.vllm.cpu_modelopt import CpuModelOptConfig
    from qat_core.rollout.vllm.cpu_routes import let_cpu_experts_report

    multiply_bf16_in_fp32()
    register_quantization_config("compressed-tensors")(CpuCompressedTensorsConfig)
    register_quantization_config("modelopt_fp4")(CpuModelOptConfig)
    let_cpu_experts_report(vllm.__version__)


def require_loaded() -> None:
    """In a process with a worker, at a weight sync.

    Raises:
        ValueError: the environment asks for a kernel, but vLLM serves its own, as it has not called
            `register` in this process.
    """
    for variable in KERNELS:
        asked = kernel_named_by(variable)
        if asked != MARLIN and variable not in _chosen:
            raise ValueError(
                f"{variable}={asked}: vLLM's worker has not loaded qat_core's plugin and serves "
                f"{MARLIN}: install qat_core (to be on PYTHONPATH is not enough), or unset it"
            )


def require_known_variables() -> None:
    """For all who start vLLM, also where it runs in another process, and later.

    Raises:
        ValueError: with a line for each variable `QAT_CORE_*` that nothing reads, or whose value is
            none of its own.
    """
    known = (*KERNELS, IN_PLACE_VARIABLE, EXACT_VARIABLE, COVERAGE_VARIABLE)
    others = [it for it in os.environ if it.startswith("QAT_CORE_") and it not in known]
    refused = [f"{it}: nothing reads it; the variables are {', '.join(known)}" for it in others]
    checks: list[Callable[[], object]] = [partial(kernel_named_by, it) for it in KERNELS]
    for check in (*checks, is_in_place_allowed, is_exact):
        try:
            check()
        except ValueError as error:
            refused.append(str(error))
    if refused:
        raise ValueError("\n".join(refused))


def is_in_place_allowed() -> bool:
    """Whether weight syncs may write packed weights past vLLM's reload, as they do by default."""
    return _switch(IN_PLACE_VARIABLE, "1")


def is_exact() -> bool:
    """Whether rollouts are to have bits that a trainer can compute too."""
    return _switch(EXACT_VARIABLE, "0")


def _switch(variable: str, default: str) -> bool:
    """ValueError for another value than 1 or 0."""
    asked = os.environ.get(variable) or default
    if asked not in ("0", "1"):
        raise ValueError(f"{variable}={asked}: use 1 or 0, or unset it for {default}")
    return asked == "1"


def require_exact() -> None:
    """ValueError where exact rollouts cannot be, or other kernels are asked for."""
    import vllm

    from qat_core.rollout.vllm import humming

    for variable in KERNELS:
        if os.environ.get(variable):
            raise ValueError(f"{variable}: exact rollouts choose kernels themselves; unset it")
    humming.require(EXACT_VARIABLE, vllm.__version__)


def asked_for(variable: str) -> str:
    """The kernel that a variable of the environment names; vLLM is set up for it.

    Raises:
        ValueError: see `register`.
    """
    name = kernel_named_by(variable)
    if name != MARLIN:
        import vllm

        if name == HUMMING:
            from qat_core.rollout.vllm import humming

            humming.require(variable, vllm.__version__)
        else:
            require_vllm(f"{variable}={name}", vllm.__version__)
    first = _chosen.setdefault(variable, name)
    if name != first:
        raise ValueError(
            f"{variable}={name}: this process has chosen {first} before; start the engine in "
            "another process"
        )
    return name


def kernel_named_by(variable: str) -> str:
    """The kernel that the environment names; ValueError if there is none of that name."""
    name = os.environ.get(variable) or MARLIN
    if name not in KERNELS[variable]:
        *others, last = KERNELS[variable][::-1]
        raise ValueError(
            f"{variable}={name}: use {', '.join(others)}, or {last}, vLLM's own choice"
        )
    return name
