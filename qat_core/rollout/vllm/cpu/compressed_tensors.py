"""NVFP4 W4A16 for vLLM on a CPU: loads what the CUDA classes load, unpacks it, computes in BF16.

Parameters have the names, shapes and loaders of the CUDA classes, so that checkpoints, weight syncs
and layer-wise reload take the same path as on a GPU. Only what follows the loading differs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported, RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW4A4Fp4,
)
from vllm.model_executor.utils import set_weight_attrs

from qat_core.nvfp4 import PackedTensor, dequantize
from qat_core.options import BLOCK_SIZE
from qat_core.weights.layouts import LAYOUTS, Layout

BF16_LINEAR = UnquantizedLinearMethod()


class CpuW4A16Linear(CompressedTensorsW4A4Fp4):  # type: ignore[misc]
    """Linear layers: `create_weights` is that of the CUDA class."""

    def __init__(self) -> None:
        self.use_a16 = True
        self.group_size = BLOCK_SIZE
        self.kernel = _NoKernel()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Unpacks the weight."""
        unpack_linear(layer, LAYOUTS["compressed-tensors"])

    def apply_weights(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """BF16 product."""
        return linear_product(layer, x, bias)


class CpuW4A16Experts(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """Fused experts: w13 holds gate and up, w2 down."""

    layout = LAYOUTS["compressed-tensors"]
    unused = "input_global_scale"  # a parameter of the CUDA class also where it plays no part

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **weight_attrs: Any,
    ) -> None:
        """The packed parameters of the CUDA class."""
        layer.num_experts, layer.params_dtype = num_experts, params_dtype
        inner = intermediate_size_per_partition
        group = weight_attrs | {"quant_method": FusedMoeWeightScaleSupported.GROUP.value}
        tensor = weight_attrs | {"quant_method": FusedMoeWeightScaleSupported.TENSOR.value}
        matrices = {"w13": (2 * inner, hidden_size), "w2": (hidden_size, inner)}
        for name, (rows, columns) in matrices.items():
            codes, scales = (rows, columns // 2), (rows, columns // BLOCK_SIZE)
            per_expert = (2,) if name == "w13" else ()
            for kind, shape, dtype, attrs in (
                (self.layout.codes, codes, torch.uint8, weight_attrs),
                (self.layout.block_scale, scales, torch.float8_e4m3fn, group),
                (self.layout.global_scale, per_expert, torch.float32, tensor),
                (self.unused, per_expert, torch.float32, tensor),
            ):
                _add(layer, f"{name}_{kind}", (num_experts, *shape), dtype, attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replaces the packed parameters by BF16 weights in the layout of vLLM's CPU kernels."""
        for name in ("w13", "w2"):
            scale = getattr(layer, f"{name}_{self.layout.global_scale}").data
            scale = scale[:, 0].contiguous() if name == "w13" else scale  # gate's, as on CUDA
            weight = _unpacked(layer, f"{name}_", self.layout, scale)
            delattr(layer, f"{name}_{self.unused}")
            setattr(layer, f"{name}_weight", weight)
        self.moe_kernel = None  # else vLLM 0.28 keeps the layout made of the weights before
        super().process_weights_after_loading(layer)


class CpuCompressedTensorsConfig(CompressedTensorsConfig):  # type: ignore[misc]
    """Chooses the classes above for NVFP4 weights with 16-bit activations."""

    def _get_scheme_from_parts(
        self, weight_quant: Any, input_quant: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._is_nvfp4_format(weight_quant) and input_quant is None:
            return CpuW4A16Linear()
        return super()._get_scheme_from_parts(weight_quant, input_quant, *args, **kwargs)

    def get_quant_method(self, layer: Module, prefix: str) -> Any:
        """Experts are quantized if all three matrices of the first one are."""
        if isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
            leaves = ("gate_proj", "up_proj", "down_proj")
            schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{leaf}") for leaf in leaves]
            if all(scheme is not None and self._is_w4a16(scheme) for scheme in schemes):
                return CpuW4A16Experts(layer.moe_config)
        return super().get_quant_method(layer, prefix)

    def _is_w4a16(self, scheme: dict[str, Any]) -> bool:
        is_nvfp4 = bool(self._is_nvfp4_format(scheme.get("weights")))
        return is_nvfp4 and scheme.get("input_activations") is None


class _NoKernel:
    """In the place of the CUDA class's kernel: activations are not quantized."""

    def input_quant_key(self) -> None:
        """None: no quantized input."""


def unpack_linear(layer: Any, layout: Layout) -> None:
    """Replaces the packed parameters by a BF16 weight in the layout of vLLM's CPU kernels."""
    scale = getattr(layer, layout.global_scale).data.max()  # one for a fused layer, as on CUDA
    layer.weight = _unpacked(layer, "", layout, scale)
    BF16_LINEAR.process_weights_after_loading(layer)


def linear_product(layer: Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """x times the weight of `unpack_linear`."""
    product: Tensor = BF16_LINEAR.apply(layer, x, bias)
    return product


def _unpacked(layer: Any, prefix: str, layout: Layout, global_scale: Tensor) -> Parameter:
    """The weight behind a layer's packed parameters, which are removed."""
    codes = getattr(layer, prefix + layout.codes).data
    block_scale = getattr(layer, prefix + layout.block_scale).data
    divisor = global_scale.reciprocal() if layout.is_multiplier else global_scale
    weight = dequantize(PackedTensor(codes, block_scale, divisor), torch.float32)
    for name in (layout.codes, layout.block_scale, layout.global_scale):
        delattr(layer, prefix + name)
    return Parameter(weight.to(layer.params_dtype), requires_grad=False)


def _add(
    layer: Module, name: str, shape: tuple[int, ...], dtype: torch.dtype, attrs: dict[str, Any]
) -> None:
    parameter = Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    layer.register_parameter(name, parameter)
    set_weight_attrs(parameter, attrs)
