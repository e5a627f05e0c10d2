"""Stream of an FSDP2-sharded model: every rank packs its shards, only packed bytes are gathered."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qat_core.nvfp4 import PackedTensor
from qat_core.plan import QuantPlan
from qat_core.recipe import Recipe
from qat_core.weights.source import packed_weights


def sharded_weight_stream(
    model: nn.Module, plan: QuantPlan, recipe: Recipe, device: torch.device
) -> Iterator[tuple[str, Tensor | PackedTensor]]:
    """As `weight_stream`, for a model whose parameters are DTensors: whole weights, on every rank.

    A collective: all ranks have to go through it together. A group at a time is in memory.

    Args:
        model: prepared or not, BF16 or FP32, on any device (offloaded shards come to `device`).
        plan: what to pack.
        recipe: scale policies.
        device: where to pack; the stream's tensors lie there.

    Raises:
        ValueError: a weight to be packed is not finite in BF16 on some rank; on all ranks alike,
            and before the first weight unless shards are offloaded.
    """
    shards = model.state_dict()
    resident = all(shards[name].device.type == device.type for name in plan.quantized)
    return packed_weights(plan, recipe, lambda name: shards[name].to(device), resident=resident)
