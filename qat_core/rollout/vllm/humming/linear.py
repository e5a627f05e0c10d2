"""Linear layers of vLLM 0.24 multiplied by Humming instead of Marlin; loaded by the plugin alone.

Asked for by `QAT_CORE_LINEAR_KERNEL=humming` in the environment of vLLM's processes. Codes lie as
for Marlin, block scales in another order; one copy is kept, so Humming serves every number of rows,
up to `UNPACK_FROM`: from there on the weight is unpacked and cuBLAS multiplies. Not the default:
docs/verl.md, "Switches".

vLLM 0.24 has no linear backend of this name and forces Marlin on W4A16, so the choice of its
scheme is replaced. This file goes when verl's pin reaches vLLM 0.32, where Humming is the default
on Hopper, if syncs keep its tensors there: the kernel that 0.28 offers makes new ones at a reload.
"""

import json
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.linear import RowParallelLinear

from qat_core.exact.slices import add_up, slices_of
from qat_core.options import BLOCK_SIZE
from qat_core.rollout.vllm.humming import few_rows
from qat_core.rollout.vllm.humming import library as humming
from qat_core.rollout.vllm.humming.tiles import EXACT_UNPACK_FROM, UNPACK_FROM, linear_tiles
from qat_core.rollout.vllm.switches import is_exact
from qat_core.rollout.vllm.tile_layout import to_layout, unpack


class HummingLinearKernel(NvFp4LinearKernel):  # type: ignore[misc]
    """W4A16 on Hopper. All tensors that a CUDA graph reads keep their memory at a reload."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Whether the GPU has the instructions that the layout is made for."""
        return humming.is_hopper(), None if humming.is_hopper() else "not a Hopper GPU (sm_90)"

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        """Layer sizes are not known yet: see `to_layout`."""
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replaces codes, block scales and multiplier of a layer by Humming's.

        vLLM's reload copies parameters into those that were there before; the locks, which kernels
        leave at zero, keep their memory. Kernels are compiled now, not while a graph is captured.
        """
        words, scale = to_layout(layer.weight.data, layer.weight_scale.data)
        layer.weight = nn.Parameter(words, requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)
        multiplier = layer.weight_global_scale.data.float().reshape(1)
        layer.weight_global_scale = nn.Parameter(multiplier, requires_grad=False)
        n, k = scale.shape[1], BLOCK_SIZE * len(scale)
        slices = slices_of(n, k) if isinstance(layer, RowParallelLinear) and is_exact() else 1
        layer.humming_slices = slices
        if hasattr(layer, "humming_locks"):
            layer.humming_locks.zero_()  # whatever vLLM's sleep has left there
        else:
            locks = torch.zeros(humming.NUM_LOCKS, dtype=torch.int32, device=words.device)
            layer.humming_locks = locks
            if is_exact():
                few_rows.prepare(n, k, EXACT_UNPACK_FROM - 1, slices)
            else:
                row = torch.zeros(1, k, dtype=torch.bfloat16, device=words.device)
                multiply(row, words, scale, multiplier, locks)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """BF16 (..., N) of BF16 (..., K)."""
        product = nvfp4_linear if is_exact() else opaque_linear
        out: Tensor = product(
            x.reshape(-1, x.shape[-1]),
            layer.weight,
            layer.weight_scale,
            layer.weight_global_scale,
            layer.humming_locks,
            layer.humming_slices,
        )
        out = out.view(*x.shape[:-1], out.shape[-1])
        return out if bias is None else out + bias


def nvfp4_linear(
    x: Tensor, words: Tensor, scale: Tensor, multiplier: Tensor, locks: Tensor, slices: int
) -> Tensor:
    """x (rows, K) times a weight in Humming's layout.

    Args:
        x: BF16.
        words, scale, multiplier: see `tile_layout.unpack`.
        locks: int32 (NUM_LOCKS,), zero before and after.
        slices: of K in the exact mode, see `qat_core.exact.slices`.
    """
    if len(x) >= (EXACT_UNPACK_FROM if is_exact() else UNPACK_FROM):
        product = add_up if slices > 1 else F.linear
        return product(x, unpack(words, scale, multiplier))
    return multiply(x.contiguous(), words, scale, multiplier, locks, slices)


# For torch.compile, as the way depends on the rows. The exact mode compiles nothing, and calls the
# function itself.
opaque_linear = torch.library.custom_op("qat_core::nvfp4_linear", nvfp4_linear, mutates_args=())


@opaque_linear.register_fake
def _(
    x: Tensor, words: Tensor, scale: Tensor, multiplier: Tensor, locks: Tensor, slices: int
) -> Tensor:
    return x.new_empty(x.shape[0], scale.shape[1])


def multiply(
    x: Tensor, words: Tensor, scale: Tensor, multiplier: Tensor, locks: Tensor, slices: int = 1
) -> Tensor:
    """Humming's product, for fewer than `UNPACK_FROM` rows; compiles its kernels at first.

    In the exact mode ours, for fewer than `EXACT_UNPACK_FROM`.
    """
    if is_exact():
        return few_rows.multiply(x, words, scale, multiplier, slices)
    from humming.forward import humming_forward

    config, compute, tiles = _kernels(scale.shape[1], BLOCK_SIZE * scale.shape[0], x.device)
    out: Tensor = humming_forward(
        config,
        inputs=x,
        weight=words,
        weight_scale=scale,
        weight_scale_2=multiplier,
        locks=locks,
        compute_config=compute,
        tuning_config=tiles,
    )
    return out


@lru_cache
def _kernels(n: int, k: int, device: torch.device) -> tuple[Any, str, str]:
    from humming.transform import prepare_layer_config

    config = prepare_layer_config(
        n, k, humming.weight_schema(), torch_dtype=torch.bfloat16, device=device
    )
    compute: dict[str, Any] = {"gemm_type": "dense"}
    return config, json.dumps(compute), json.dumps(linear_tiles(config))
