"""vLLM plugin (`vllm.general_plugins`): what vLLM itself does not run in NVFP4 W4A16, or slowly.

vLLM runs W4A16 with the Marlin kernel only and refuses it on a CPU. With this plugin the same
checkpoints and weight syncs run there in BF16, unpacked when they arrive, and experts tell their
routes. On CUDA nothing changes unless `QAT_CORE_LINEAR_KERNEL=humming` asks for other kernels of
linear layers (of the compressed-tensors form, which syncs have; those of a ModelOpt checkpoint keep
Marlin), or `QAT_CORE_EXPERTS_KERNEL=humming` for other ones of experts. The first engine of a
process decides for all of them.
"""

import os

LINEAR_VARIABLE = "QAT_CORE_LINEAR_KERNEL"
EXPERTS_VARIABLE = "QAT_CORE_EXPERTS_KERNEL"

_kernels: dict[str, str] = {}  # by variable, of the process's first engine


def register() -> None:
    """Called by every vLLM process at its start.

    Raises:
        ValueError: the environment asks for a kernel that is not known or cannot run here, or for
            another one than an engine of this process has: what it replaced in vLLM stays.
    """
    from vllm.platforms import current_platform

    if _asks_for_humming(LINEAR_VARIABLE):
        from qat_core.rollout.vllm import humming_linear

        humming_linear.install()
    if _asks_for_humming(EXPERTS_VARIABLE):
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


def _asks_for_humming(variable: str) -> bool:
    name = os.environ.get(variable) or "marlin"
    if name not in ("marlin", "humming"):
        raise ValueError(f"{variable}={name}: use humming, or marlin, vLLM's own choice")
    if name == "humming":
        import vllm

        from qat_core.rollout.vllm import humming

        humming.require(variable, vllm.__version__)
    first = _kernels.setdefault(variable, name)
    if name != first:
        raise ValueError(
            f"{variable}={name}: an engine of this process was made with {first}; make this one in "
            "another process"
        )
    return name == "humming"
