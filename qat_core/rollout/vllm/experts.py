"""Experts go into vLLM whole: a few tensors a layer.

vLLM's loader takes each matrix of each expert by name, which takes seconds. Here the fused weights,
already laid out as vLLM's w13 (gate above up) and w2 (down), are handed to the same layer-wise
reload in one piece each, of which a rank takes its share.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qat_core.nvfp4 import PackedTensor
from qat_core.rollout.vllm.shares import own_experts, own_part
from qat_core.weights.hub_names import HubNames, Weight
from qat_core.weights.layouts import Layout

FUSED = {"gate_up_proj": "w13", "down_proj": "w2"}


@contextmanager
def loading_experts_whole(model: nn.Module, names: HubNames) -> Iterator[dict[str, nn.Module]]:
    """Expert layers by the hub's prefix; inside, a reload takes their parameters whole.

    Those that files have whole too (gpt-oss) are left to vLLM's own loader.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    layers, originals = {}, []
    for name, module in model.named_modules():
        parameters, _ = get_layerwise_info(module).restore_metadata
        fused = {n: p for n, p in parameters.items() if n.startswith(("w13_", "w2_"))}
        prefix = f"{name.partition('.experts')[0]}.experts"
        if fused and names.experts_at(prefix):
            layers[prefix] = module
            originals += [(parameter, parameter.weight_loader) for parameter in fused.values()]
    for parameter, _ in originals:
        parameter.weight_loader = _copy_whole
    try:
        yield layers
    finally:
        for parameter, loader in originals:
            parameter.weight_loader = loader


def load_experts(layer: Any, leaf: str, weight: Weight, layout: Layout) -> None:
    """One fused weight (E, N, K) of a layer, BF16 or packed."""
    matrix = FUSED[leaf]
    own = own_experts(layer, weight.shape[0])
    for kind, tensor in _tensors(matrix, weight, layout):
        parameter = getattr(layer, f"{matrix}_{kind}")
        parameter.weight_loader(parameter, own_part(layer, matrix, tensor[own]))


def _tensors(matrix: str, weight: Weight, layout: Layout) -> list[tuple[str, Tensor]]:
    if not isinstance(weight, PackedTensor):
        return [("weight", weight)]
    scale = weight.global_scale
    if matrix == "w13":  # one for gate, one for up
        scale = scale[:, None].expand(-1, 2)
    # The last plays no part, but without it vLLM takes the layer for unfinished until the end.
    return [
        (layout.codes, weight.codes),
        (layout.block_scale, weight.block_scale),
        (layout.global_scale, scale),
        ("input_global_scale", torch.ones_like(scale)),
    ]


def _copy_whole(param: Tensor, loaded_weight: Tensor) -> None:
    assert param.shape == loaded_weight.shape, (param.shape, loaded_weight.shape)
    param.data.copy_(loaded_weight)
