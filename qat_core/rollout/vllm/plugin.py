"""vLLM plugin (`vllm.general_plugins`): what vLLM itself does not run in NVFP4 W4A16, or slowly.

vLLM refuses W4A16 on a CPU. With this plugin the same checkpoints and weight syncs run there in
BF16, unpacked when they arrive, and experts tell their routes. On CUDA nothing changes unless
`QAT_CORE_LINEAR_KERNEL` asks for kernels of this project for linear layers (of the
compressed-tensors form, which syncs have; those of a ModelOpt checkpoint keep vLLM's), or
`QAT_CORE_EXPERTS_KERNEL` for other ones of experts. Between vLLM's own kernels its settings choose,
which `VllmEngine` gives. The first engine of a process decides for all of them.
"""

import os

from qat_core.rollout.vllm.compat import PINNED, WITH_OWN_HUMMING, is_one_of
from qat_core.rollout.vllm.kernel_choice import require_vllm, use_for_linear
from qat_core.rollout.vllm.switches import (
    EXACT_VARIABLE,
    EXPERTS_VARIABLE,
    HUMMING,
    LINEAR_VARIABLE,
    MARLIN,
    MARLIN_UNPACK,
    OWN_HUMMINGS,
    is_exact,
    kernel_named_by,
    kernels_of_plugin,
    require_known_variables,
    require_no_kernels,
    require_unset,
)

MADE_FOR = {  # of vLLM
    **dict.fromkeys((HUMMING, MARLIN_UNPACK), PINNED),
    **dict.fromkeys(OWN_HUMMINGS, WITH_OWN_HUMMING),
}
_chosen: dict[str, str] = {}  # by variable, of the process's first engine
_is_loaded = False


def register() -> None:
    """Called by every vLLM process at its start.

    Raises:
        ValueError: the environment asks for a kernel that is not known or cannot run here, or for
            another one than an engine of this process has: what it replaced in vLLM stays. Or see
            `require_known_variables`.
    """
    global _is_loaded
    require_known_variables()
    _set_up()
    _is_loaded = True


def _set_up() -> None:
    exact_or_not = str(is_exact())
    if _chosen.get(EXACT_VARIABLE, exact_or_not) != exact_or_not:
        raise ValueError(f"{EXACT_VARIABLE}: this process has started another engine before")
    if is_exact():
        require_exact()
    _chosen[EXACT_VARIABLE] = exact_or_not
    if is_exact():
        from qat_core.rollout.vllm.exact import install as exact

        exact.install()
        return
    linear = asked_for(LINEAR_VARIABLE)
    if linear == HUMMING:
        from qat_core.rollout.vllm.humming.linear import HummingLinearKernel

        use_for_linear(HummingLinearKernel)
    elif linear == MARLIN_UNPACK:
        from qat_core.rollout.vllm.marlin.unpacking import MarlinUnpackKernel

        use_for_linear(MarlinUnpackKernel)
    experts = asked_for(EXPERTS_VARIABLE)
    if experts == HUMMING:
        from qat_core.rollout.vllm.humming import experts as humming_experts

        humming_experts.install()
    if linear in OWN_HUMMINGS or experts in OWN_HUMMINGS:
        from qat_core.rollout.vllm import own_humming

        own_humming.install(linear, experts)
    _serve_on_a_cpu()


def _serve_on_a_cpu() -> None:
    """NVFP4 weights, and routes; on a GPU vLLM has both."""
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from qat_core.bf16_on_cpu import multiply_bf16_in_fp32
    from qat_core.rollout.vllm.cpu.compressed_tensors import CpuCompressedTensorsConfig
    from qat_core.rollout.vllm.cpu.modelopt import CpuModelOptConfig
    from qat_core.rollout.vllm.cpu.routes import let_cpu_experts_report

    multiply_bf16_in_fp32()
    register_quantization_config("compressed-tensors")(CpuCompressedTensorsConfig)
    register_quantization_config("modelopt_fp4")(CpuModelOptConfig)
    let_cpu_experts_report(vllm.__version__)


def require_loaded() -> None:
    """In a process with a worker, at a weight sync.

    Raises:
        ValueError: the environment asks for what `register` sets up, but vLLM has not called it in
            this process.
    """
    asked = [*kernels_of_plugin(os.environ), *(["exact rollouts"] if is_exact() else [])]
    if asked and not _is_loaded:
        raise ValueError(
            f"{', '.join(asked)}: vLLM's worker has not loaded this package's plugin: install the "
            "package where vLLM runs (to be on PYTHONPATH is not enough); VLLM_PLUGINS, if set, "
            "has to name it"
        )


def require_exact() -> None:
    """ValueError where exact rollouts cannot be, or other kernels are asked for."""
    import vllm

    from qat_core.rollout.vllm.humming import library as humming

    require_no_kernels(os.environ)
    asked = "exact rollouts"
    instead = f"install vLLM {', '.join(PINNED)}, or serve without the exact mode"
    require_vllm(asked, vllm.__version__, PINNED, instead)
    humming.require(asked, "serve without the exact mode")


def asked_for(variable: str) -> str:
    """The kernel that a variable of the environment names; vLLM is set up for it."""
    name = kernel_named_by(variable)
    if name != MARLIN:
        import vllm

        asked = f"{variable}={name}"
        version = vllm.__version__
        hummings = [it for it in (HUMMING, *OWN_HUMMINGS) if is_one_of(version, MADE_FOR[it])]
        instead = ", or use ".join(["unset it", *hummings])
        require_vllm(asked, version, MADE_FOR[name], instead)
        if name == HUMMING:
            from qat_core.rollout.vllm.humming import library as humming

            humming.require(asked, "unset it to use Marlin")
        if name in OWN_HUMMINGS:
            others = [it for it in os.environ if it.startswith("VLLM_HUMMING_")]
            others.append("VLLM_BATCH_INVARIANT")
            require_unset(others, os.environ, f"{asked} is vLLM's Humming without it")
    first = _chosen.setdefault(variable, name)
    if name != first:
        raise ValueError(
            f"{variable}={name}: this process has chosen {first} before; start the engine in "
            "another process"
        )
    return name
