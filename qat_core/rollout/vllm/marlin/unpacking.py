"""Linear layers of vLLM 0.24 by Marlin for few rows, unpacked for many; loaded by the plugin alone.

Asked for by `QAT_CORE_LINEAR_KERNEL=marlin-unpack`: from `UNPACK_FROM` rows on, as in prefill,
unpacking a weight and multiplying it by cuBLAS is faster on Hopper. Both ways repeat their bits,
and weights stay as Marlin has them. This file goes together with `humming/linear.py`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import apply_fp4_marlin_linear

from qat_core.options import BLOCK_SIZE
from qat_core.rollout.vllm.marlin.layout import is_padded
from qat_core.rollout.vllm.tile_layout import unpack_marlin

# On an H100 this way took at most 22 % more time than the better of both, at every number of rows,
# for the linear layers of Qwen3-8B and 30B-A3B (docs/history.md: products).
# What is unpacked there is a checkpoint's layout; that of Marlin has not been timed.
UNPACK_FROM = 512


class MarlinUnpackKernel(MarlinNvFp4LinearKernel):  # type: ignore[misc]
    """W4A16, BF16 activations; holds what Marlin holds."""

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., N) of (..., K); FP16, or with a bias, whose places Marlin changes, by Marlin."""
        out: Tensor
        if bias is not None or is_padded(layer) or x.dtype != torch.bfloat16:
            out = super().apply_weights(layer, x, bias)
            return out
        rows = x.reshape(-1, x.shape[-1])
        held = layer.weight, layer.weight_scale, layer.weight_global_scale
        out = marlin_or_unpacked(rows, *held, getattr(layer, "workspace", None))
        return out.view(*x.shape[:-1], out.shape[-1])


@torch.library.custom_op("qat_core::marlin_or_unpacked", mutates_args=())
def marlin_or_unpacked(
    x: Tensor, words: Tensor, scale: Tensor, multiplier: Tensor, workspace: Tensor | None
) -> Tensor:
    """BF16 x (rows, K) times a weight in Marlin's layout, whose workspace is zero before and after.

    Opaque, as the way depends on the rows.
    """
    if len(x) >= UNPACK_FROM:
        return F.linear(x, unpack_marlin(words, scale, multiplier))
    size_k, size_n = BLOCK_SIZE * words.shape[0], words.shape[1] // 2
    out: Tensor = apply_fp4_marlin_linear(
        x, words, scale, multiplier, workspace, size_n=size_n, size_k=size_k
    )
    return out


@marlin_or_unpacked.register_fake
def _(
    x: Tensor, words: Tensor, scale: Tensor, multiplier: Tensor, workspace: Tensor | None
) -> Tensor:
    return x.new_empty(x.shape[0], words.shape[1] // 2)
