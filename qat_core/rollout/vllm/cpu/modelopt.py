"""ModelOpt's NVFP4 W4A16 checkpoints for vLLM on a CPU: see cpu.py."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter

from qat_core.options import BLOCK_SIZE
from qat_core.rollout.vllm.cpu.compressed_tensors import (
    CpuW4A16Experts,
    linear_product,
    unpack_linear,
)
from qat_core.weights.layouts import LAYOUTS

LAYOUT = LAYOUTS["modelopt"]


@register_weight_loader_v2_supported_method
class CpuModelOptLinear(LinearMethodBase):  # type: ignore[misc]
    """Linear layers; written out, as vLLM's own class for them is another one since 0.30."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """The packed parameters of the CUDA class."""
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        loader = {"weight_loader": extra_weight_attrs["weight_loader"]}
        matrix = loader | {"input_dim": 1, "output_dim": 0}
        layer.params_dtype = params_dtype
        layer.logical_widths = output_partition_sizes
        codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
        block_scale = torch.empty(rows, columns // BLOCK_SIZE, dtype=torch.float8_e4m3fn)
        layer.register_parameter(LAYOUT.codes, ModelWeightParameter(data=codes, **matrix))
        layer.register_parameter(
            LAYOUT.block_scale, ModelWeightParameter(data=block_scale, **matrix)
        )
        for name in (LAYOUT.global_scale, "input_scale"):  # one for each fused part
            scale = torch.empty(len(output_partition_sizes))
            layer.register_parameter(name, PerTensorScaleParameter(data=scale, **loader))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Unpacks the weight."""
        del layer.input_scale
        unpack_linear(layer, LAYOUT)

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """BF16 product."""
        return linear_product(layer, x, bias)


class CpuModelOptExperts(CpuW4A16Experts):
    """Fused experts under ModelOpt's names."""

    layout = LAYOUT
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
        self.is_w4a16 = quant_method == "W4A16_NVFP4"
        if self.is_w4a16:
            self.FusedMoEMethodCls = CpuModelOptExperts

    def get_quant_method(self, layer: Module, prefix: str) -> Any:
        """Linear layers that the checkpoint does not exclude are quantized."""
        if self.is_w4a16 and isinstance(layer, LinearBase) and not self.is_layer_excluded(prefix):
            return CpuModelOptLinear()
        return super().get_quant_method(layer, prefix)
