"""Ways to multiply BF16 activations with a dense NVFP4 weight on a GPU.

Each takes the weight once, packed and as BF16 of the same values, and returns the product.
vLLM and Humming are imported where they are used: neither is needed for the others.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.benchmarks.products.humming_layer import HummingLayer, Tiling
from qat_core.nvfp4 import PackedTensor, dequantize_into
from qat_core.rollout.vllm.humming.tiles import UNPACK_FROM

Product = Callable[[Tensor], Tensor]


def bf16(packed: PackedTensor, weight: Tensor, tokens: Sequence[int]) -> Product:
    """cuBLAS on weights kept in BF16: what NVFP4 is compared with."""
    return lambda x: F.linear(x, weight)


def dequantize_bf16(packed: PackedTensor, weight: Tensor, tokens: Sequence[int]) -> Product:
    """Unpack the layer into a buffer that all layers share, then cuBLAS."""
    buffer = shared_buffer(tuple(weight.shape), weight.device)

    def product(x: Tensor) -> Tensor:
        dequantize_into(packed, buffer)
        return F.linear(x, buffer)

    return product


def triton_persistent(packed: PackedTensor, weight: Tensor, tokens: Sequence[int]) -> Product:
    """vLLM's batch-invariant BF16 product: Triton, one tile shape, sums in the order of K."""
    from vllm.model_executor.layers.batch_invariant import matmul_persistent

    transposed = weight.t()
    return lambda x: matmul_persistent(x, transposed)


def marlin(packed: PackedTensor, weight: Tensor, tokens: Sequence[int]) -> Product:
    """vLLM's W4A16 kernel of today."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(packed.codes, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(packed.block_scale, requires_grad=False)
    multiplier = packed.global_scale.reciprocal()
    layer.weight_global_scale = torch.nn.Parameter(multiplier, requires_grad=False)
    layer.output_size_per_partition, layer.input_size_per_partition = weight.shape
    layer.params_dtype = torch.bfloat16
    marlin_utils_fp4.prepare_fp4_layer_for_marlin(layer)
    return partial(
        marlin_utils_fp4.apply_fp4_marlin_linear,
        weight=layer.weight,
        weight_scale=layer.weight_scale,
        weight_global_scale=layer.weight_global_scale,
        workspace=layer.workspace,
        size_n=weight.shape[0],
        size_k=weight.shape[1],
    )


def humming(
    packed: PackedTensor, weight: Tensor, tokens: Sequence[int], *, tiling: Tiling = "default"
) -> Product:
    """humming-kernels with tiles that it picks by the number of rows."""
    layer = HummingLayer(packed, "dense", tokens, tiling)
    return layer.multiply


def humming_served(packed: PackedTensor, weight: Tensor, tokens: Sequence[int]) -> Product:
    """As vLLM serves it here: some tiles of our choice, and many rows unpacked, then cuBLAS."""
    multiply = humming(packed, weight, tokens, tiling="served")
    unpacked = dequantize_bf16(packed, weight, tokens)
    return lambda x: multiply(x) if len(x) < UNPACK_FROM else unpacked(x)


ARMS: dict[str, Callable[..., Product]] = {
    "bf16": bf16,
    "dequantize + bf16": dequantize_bf16,
    "triton persistent": triton_persistent,
    "marlin": marlin,
    "humming": humming,
    "humming unsplit": partial(humming, tiling="unsplit"),
    "humming invariant": partial(humming, tiling="invariant"),
    "humming served": humming_served,
}


@lru_cache(maxsize=1)  # of the layer at hand
def shared_buffer(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """BF16 memory for one unpacked weight."""
    return torch.empty(shape, dtype=torch.bfloat16, device=device)
