"""Weights repacked for Marlin with less time and memory than vLLM takes; the same bytes.

Marlin's layout cuts a matrix (K, N) into tiles of 16 rows, one after the other. Experts stacked
along K are therefore one tall matrix whose repacked form is that of the experts, stacked; vLLM's
loop over them waits for the GPU at each. Its search for the largest block scale makes an index
tensor of 16 bytes a scale, more than all else that a dense layer needs meanwhile.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qat_core.options import BLOCK_SIZE


def is_padded(layer: Any) -> bool:
    """Whether a linear layer, prepared for Marlin, has more rows or columns than its weight."""
    n, k = layer.output_size_per_partition, layer.input_size_per_partition
    return bool(layer.weight.shape != (k // BLOCK_SIZE, 2 * n))


def are_padded(layer: Any) -> bool:
    """Whether experts, prepared for Marlin, have a wider intermediate size than their weights."""
    k, n = layer.hidden_size, layer.intermediate_size_per_partition
    shapes = layer.w13_weight.shape[1:], layer.w2_weight.shape[1:]
    return bool(shapes != ((k // BLOCK_SIZE, 4 * n), (n // BLOCK_SIZE, 2 * k)))


def fit_tiles(hidden_size: int, intermediate_size: int) -> bool:
    """Whether vLLM prepares experts without padding, `prepare_nvfp4_moe_layer_for_marlin`.

    Marlin's tiles are 64 by 128 elements, either way round.
    """
    return not (hidden_size % 64 or intermediate_size % (128 if hidden_size % 128 else 64))


@contextmanager
def lean_repacking() -> Iterator[None]:
    """Inside, vLLM prepares the experts of a layer for Marlin through `prepare_experts`.

    It also finds the factor of block scales, dense or MoE, by their largest alone.
    """
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin

    vllms_prepare = oracle.prepare_nvfp4_moe_layer_for_marlin
    is_marlins = not getattr(vllms_prepare, "lays_out_for_humming", False)
    vllms_factor = marlin._nvfp4_compute_scale_factor

    def prepare(w13: Tensor, w2: Tensor, layer: Any, **others: Any) -> tuple[Tensor, ...]:
        fit = fit_tiles(layer.hidden_size, layer.intermediate_size_per_partition)
        way = prepare_experts if is_marlins and fit else vllms_prepare
        return way(w13=w13, w2=w2, layer=layer, **others)

    def factor(scales: Tensor, dtype: torch.dtype | None = None) -> float:
        return vllms_factor(scales.amax().reshape(1), dtype)  # type: ignore[no-any-return]

    oracle.prepare_nvfp4_moe_layer_for_marlin = prepare
    marlin._nvfp4_compute_scale_factor = factor
    try:
        yield
    finally:
        oracle.prepare_nvfp4_moe_layer_for_marlin = vllms_prepare
        marlin._nvfp4_compute_scale_factor = vllms_factor


def prepare_experts(
    layer: Any,
    w13: Tensor,
    w13_scale: Tensor,
    w13_scale_2: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_scale_2: Tensor,
    is_act_and_mul: bool,
) -> tuple[Tensor, ...]:
    """As vLLM's `prepare_nvfp4_moe_layer_for_marlin`, for sizes that need no padding.

    Codes are uint8 (E, N, K / 2), block scales E4M3 (E, N, K / 16), global scales multipliers (E,).
    The same three of w13, then of w2, come as Marlin reads them.
    """
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    if hasattr(layer, "workspace"):
        layer.workspace.zero_()  # captured graphs use this memory; whatever a sleep has left there
    elif not hasattr(marlin_utils, "get_marlin_workspace"):  # since 0.30 one serves all layers
        layer.workspace = marlin_utils.marlin_make_workspace_new(w13.device, 4)
    w13_scales = permute_scales(w13_scale, w13_scale_2, layer.params_dtype)
    w2_scales = permute_scales(w2_scale, w2_scale_2, layer.params_dtype)
    return repack_codes(w13), *w13_scales, repack_codes(w2), *w2_scales


def repack_codes(codes: Tensor) -> Tensor:
    """(E, N, K / 2) uint8 to Marlin's (E, K / 16, 2 N) int32."""
    import vllm._custom_ops as ops

    num_experts, size_n, _ = codes.shape
    # (E * K / 8, N), which the kernel wants contiguous; reshape() copies for several experts alone
    rows = codes.view(torch.int32).transpose(1, 2).reshape(-1, size_n).contiguous()
    order: dict[str, Tensor] = {}
    if "perm" in inspect.signature(ops.gptq_marlin_repack).parameters:  # up to vLLM 0.29
        order["perm"] = torch.empty(0, dtype=torch.int, device=codes.device)
    repacked: Tensor = ops.gptq_marlin_repack(
        b_q_weight=rows, size_k=8 * len(rows), size_n=size_n, num_bits=4, **order
    )
    return repacked.view(num_experts, -1, repacked.shape[1])


def permute_scales(scale: Tensor, scale_2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Block scales (E, N, K / 16) to Marlin's (E, K / 16, N); global scales (E,) to match."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin

    num_experts, size_n, _ = scale.shape
    scale = scale.to(dtype)
    factor = marlin._nvfp4_compute_scale_factor(scale, dtype)  # one for all experts, as in vLLM
    rows = scale.transpose(1, 2).reshape(-1, size_n)  # (E * K / 16, N)
    permuted = marlin.marlin_permute_scales(
        s=rows, size_k=BLOCK_SIZE * len(rows), size_n=size_n, group_size=BLOCK_SIZE
    )
    processed, _ = marlin.nvfp4_marlin_process_scales(permuted, scale_factor=factor, a_dtype=dtype)
    multiplier = marlin.nvfp4_marlin_process_global_scale(scale_2, dtype) / factor
    return processed.view(num_experts, -1, size_n), multiplier
