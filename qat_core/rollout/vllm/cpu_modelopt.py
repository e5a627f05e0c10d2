"""ModelOpt's NVFP4 W4A16 checkpoints for vLLM on a CPU: see vllm_cpu.py."""

from typing import Any

from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptNvFp4Config,
    ModelOptNvFp4W4A16LinearMethod,
)

from qat_core.rollout.vllm.cpu import CpuW4A16Experts, linear_product, unpack_linear
from qat_core.weights.layouts import LAYOUTS


@register_weight_loader_v2_supported_method
class CpuModelOptLinear(ModelOptNvFp4W4A16LinearMethod):  # type: ignore[misc]
    """Linear layers: `create_weights` is that of the CUDA class."""

    def __init__(self, quant_config: Any) -> None:
        self.quant_config = quant_config

    def process_weights_after_loading(self, layer: Any) -> None:
        """Unpacks the weight."""
        del layer.input_scale
        unpack_linear(layer, LAYOUTS["modelopt"])

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """BF16 product."""
        return linear_product(layer, x, bias)


class CpuModelOptExperts(CpuW4A16Experts):
    """Fused experts under ModelOpt's names."""

    layout = LAYOUTS["modelopt"]
    unused = "input_scale"

    def __init__(self, quant_config: Any, moe_config: Any) -> None:
        super().__init__(moe_config)

    def uses_weight_scale_2_pattern(self) -> bool:
        """Tells vLLM's loader which scale is the global one."""
        return True


class CpuModelOptConfig(ModelOptNvFp4Config):  # type: ignore[misc]
    """Chooses the classes above for weights with 16-bit activations."""

    def __init__(self, quant_method: str = "NVFP4", *args: Any, **kwargs: Any) -> None:
        super().__init__(quant_method, *args, **kwargs)
        if quant_method == "W4A16_NVFP4":
            self.LinearMethodCls = CpuModelOptLinear
            self.FusedMoEMethodCls = CpuModelOptExperts
