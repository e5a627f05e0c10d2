"""Packed weights written into the tensors that the kernels of a vLLM layer read."""

from typing import Any

from torch import Tensor

from qat_core.nvfp4 import PackedTensor
from qat_core.rollout.vllm.tile_layout import lay_out_for_humming, lay_out_for_marlin


def write_humming(layer: Any, packed: PackedTensor) -> None:
    """Into a layer of `HummingLinearKernel`."""
    written = layer.weight.data, layer.weight_scale.data
    lay_out_for_humming(packed.codes, packed.block_scale, *written)
    layer.weight_global_scale.data.copy_(packed.global_scale.reciprocal().reshape(1))
    layer.humming_locks.zero_()


def write_humming_experts(layer: Any, packed: PackedTensor, matrix: str) -> None:
    """Into w13 or w2 of experts that `HummingExperts` multiplies."""
    written = _weight_and_scale(layer, matrix)
    lay_out_for_humming(packed.codes, packed.block_scale, *written)
    getattr(layer, f"{matrix}_weight_scale_2").copy_(packed.global_scale.reciprocal())
    _keep_loaded_scale(layer, packed, matrix)


def write_marlin(layer: Any, packed: PackedTensor) -> None:
    """Into a linear layer of vLLM's Marlin kernel."""
    written = layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data
    lay_out_for_marlin(packed, *written)
    layer.workspace.zero_()


def write_marlin_experts(layer: Any, packed: PackedTensor, matrix: str) -> None:
    """Into w13 or w2 of vLLM's Marlin experts."""
    multiplier = getattr(layer, f"{matrix}_weight_scale_2")
    lay_out_for_marlin(packed, *_weight_and_scale(layer, matrix), multiplier)
    _keep_loaded_scale(layer, packed, matrix)
    layer.workspace.zero_()


def _weight_and_scale(layer: Any, matrix: str) -> tuple[Tensor, Tensor]:
    return getattr(layer, f"{matrix}_weight").data, getattr(layer, f"{matrix}_weight_scale").data


def _keep_loaded_scale(layer: Any, packed: PackedTensor, matrix: str) -> None:
    """As after a reload: what experts have loaded stays beside what their kernel reads of it.

    Only compressed-tensors' form has it: (E, 2) of gate and up, (E,) of down.
    """
    loaded = getattr(layer, f"{matrix}_weight_global_scale", None)
    if loaded is not None:
        loaded.data.copy_(packed.global_scale.view(-1, *[1] * (loaded.ndim - 1)))
