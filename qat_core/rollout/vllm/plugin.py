"""vLLM plugin (`vllm.general_plugins`): what vLLM itself does not run in NVFP4 W4A16, or slowly.

vLLM runs W4A16 with the Marlin kernel only and refuses it on a CPU. With this plugin the same
checkpoints and weight syncs run there in BF16, unpacked when they arrive, and experts tell their
routes. On CUDA nothing changes unless `QAT_CORE_LINEAR_KERNEL=humming` asks for other kernels of
linear layers and experts.
"""

import os

KERNEL_VARIABLE = "QAT_CORE_LINEAR_KERNEL"


def register() -> None:
    """Called by every vLLM process at its start.

    Raises:
        ValueError: the environment asks for a kernel that is not known or cannot run here.
    """
    from vllm.platforms import current_platform

    _choose_kernel(os.environ.get(KERNEL_VARIABLE, ""))
    if not current_platform.is_cpu():
        return
    import vllm
    from vllm.model_executor.layers.quantization import register_quantization_config

    from qat_core.rollout.vllm.cpu import CpuCompressedTensorsConfig
    from qat_core.rollout.vllm.cpu_modelopt import CpuModelOptConfig
    from qat_core.rollout.vllm.cpu_routes import let_cpu_experts_tell

    register_quantization_config("compressed-tensors")(CpuCompressedTensorsConfig)
    register_quantization_config("modelopt_fp4")(CpuModelOptConfig)
    let_cpu_experts_tell(vllm.__version__)


def _choose_kernel(name: str) -> None:
    if name not in ("", "marlin", "humming"):
        raise ValueError(f"{KERNEL_VARIABLE}={name}: use humming, or marlin, vLLM's own choice")
    if name == "humming":
        import vllm

        from qat_core.rollout.vllm import humming_linear

        humming_linear.install(vllm.__version__)
        from qat_core.rollout.vllm import humming_experts

        humming_experts.install()
