"""vLLM plugin (`vllm.general_plugins`): NVFP4 W4A16 checkpoints on vLLM's CPU backend.

vLLM runs W4A16 with the Marlin kernel only and refuses it on a CPU. With this plugin the same
checkpoints and weight syncs run there in BF16, unpacked when they arrive, and experts tell their
routes. Nothing changes on CUDA.
"""


def register() -> None:
    """Called by every vLLM process at its start."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from qat_core.rollout.vllm.cpu import CpuCompressedTensorsConfig
    from qat_core.rollout.vllm.cpu_modelopt import CpuModelOptConfig
    from qat_core.rollout.vllm.cpu_routes import let_cpu_experts_tell

    register_quantization_config("compressed-tensors")(CpuCompressedTensorsConfig)
    register_quantization_config("modelopt_fp4")(CpuModelOptConfig)
    let_cpu_experts_tell()
