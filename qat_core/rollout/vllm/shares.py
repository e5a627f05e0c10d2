"""Which part of a weight a worker serves, where tensor or expert parallel workers share a model."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qat_core.nvfp4 import PackedTensor
from qat_core.options import BLOCK_SIZE


def own_of_linear(layer: Any, parts: list[PackedTensor]) -> PackedTensor:
    """A worker's share of the matrices that a linear layer of vLLM holds, one above the other.

    They are whole, (N, K) each, with one global scale. ValueError if one is not of the size that
    all workers together serve.
    """
    width, rank, size = layer.input_size_per_partition, layer.tp_rank, layer.tp_size
    codes, scales = [], []
    for part, height, rows in zip(
        parts, layer.output_partition_sizes, _whole_rows(layer), strict=True
    ):
        _require_shape(part, (rows, layer.input_size))
        # heads of keys and values that are fewer than the workers are served by several
        first_row = height * (rank * (rows // height) // size)
        first_column = width * (rank * (layer.input_size // width) // size)
        own = slice(first_row, first_row + height)
        codes.append(part.codes[own, first_column // 2 : (first_column + width) // 2])
        blocks = slice(first_column // BLOCK_SIZE, (first_column + width) // BLOCK_SIZE)
        scales.append(part.block_scale.view(torch.uint8)[own, blocks])
    scale = _above_each_other(scales).view(torch.float8_e4m3fn)
    return replace(parts[0], codes=_above_each_other(codes), block_scale=scale)


def _whole_rows(layer: Any) -> list[int]:
    """Of each matrix; vLLM counts keys and values once for each worker that serves them."""
    rows = layer.output_sizes if hasattr(layer, "output_sizes") else [layer.output_size]
    replicas = getattr(layer, "num_kv_head_replicas", 1)
    return rows[:1] + [num_rows // replicas for num_rows in rows[1:]]


def _require_shape(packed: PackedTensor, served: tuple[int, ...]) -> None:
    if packed.shape != served:
        raise ValueError(
            f"{tuple(packed.shape)} is sent, {served} served: trainer and engine read other "
            "configurations of the model"
        )


def _above_each_other(parts: list[Tensor]) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def own_of_experts(matrix: str, own: Any, layer: Any, parts: list[PackedTensor]) -> PackedTensor:
    """A worker's share of all experts' w13 or w2, the only part, (E, N, K).

    `own` is that of `own_experts`, which waits for the GPU. ValueError as `own_of_linear`.
    """
    (packed,) = parts
    num_experts, hidden = layer.moe_config.num_experts, layer.hidden_size
    inner = layer.intermediate_size_per_partition * layer.moe_config.moe_parallel_config.tp_size
    of_expert = (2 * inner, hidden) if matrix == "w13" else (hidden, inner)
    _require_shape(packed, (num_experts, *of_expert))
    scale = own_part(layer, matrix, packed.block_scale.view(torch.uint8)[own]).contiguous()
    return PackedTensor(
        own_part(layer, matrix, packed.codes[own]).contiguous(),
        scale.view(torch.float8_e4m3fn),
        packed.global_scale[own],
    )


def own_experts(layer: Any, num_experts: int) -> Any:
    """Which experts an expert parallel rank serves, as an index; else all of them."""
    if layer.moe_config.moe_parallel_config.ep_size == 1:
        return slice(None)
    to_local = layer._map_global_expert_id_to_local_expert_id
    own = [expert for expert in range(num_experts) if to_local(expert) >= 0]
    first, last = own[0], own[-1]
    return slice(first, last + 1) if len(own) == last + 1 - first else own


def own_part(layer: Any, matrix: str, tensor: Tensor) -> Tensor:
    """Which part of each expert's tensor (E, ...) a tensor parallel rank serves.

    The intermediate size is split: rows of gate and of up, columns of down. Global scales are not.
    """
    parallel = layer.moe_config.moe_parallel_config
    rank, size = int(parallel.tp_rank), int(parallel.tp_size)
    if size == 1 or tensor.ndim < 3:
        return tensor
    if matrix == "w2":
        return tensor.chunk(size, dim=-1)[rank]
    num_experts, rows, columns = tensor.shape
    by_rank = tensor.view(num_experts, 2, size, rows // (2 * size), columns)
    return by_rank[:, :, rank].flatten(1, 2)
