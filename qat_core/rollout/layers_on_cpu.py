"""Attention and RMSNorm with fewer operators, for small models on a CPU.

transformers' norms are eight operators forward and a dozen backward: here one backward step, and
the same bits forward. Attention in an engine is PyTorch's kernel, to which queries that share a key
head go together at each token: the same bits too, without a copy of the cache for each of them.
Pretraining has its own attention, in FP32, whose backward pass takes half the time of PyTorch's.

Rollouts and scores keep PyTorch's, as the difference of its sums over one token and over many is
the noise floor of the mismatch metrics: with FP32 on both sides it is a hundred times lower, and
with FP32 on one side twice as high.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from qat_core.rollout.static_cache import grouped_query_attention, has_static_form

IN_FP32, GROUPED = "fp32_on_cpu", "grouped_on_cpu"


def use_layers_for_cpu(model: Any, attention: str | None = None) -> None:
    """Lets a model on a CPU compute by them; nothing changes on other devices.

    Models with attention to some tokens only, or with other norms, keep those of transformers.
    """
    if model.device.type != "cpu":
        return
    if attention and has_static_form(model):
        model.config._attn_implementation = attention
    for module in model.modules():
        if type(module).__name__ in ("Qwen3RMSNorm", "Qwen3MoeRMSNorm"):
            module.forward = _Norm(module)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention in FP32, rounded as in PyTorch's kernel for BF16.

    Args:
        module: unused, part of the interface.
        query: (B, query heads, Q, D).
        key: (B, key heads, L, D); in FP32 it is taken as it is.
        value: the same.
        attention_mask: bool (B or 1, 1, Q, L), true where a token is seen.
        scaling: of the scores.

    Returns:
        (B, Q, query heads, D), and None for the weights.
    """
    batch_size, heads, length, head_size = query.shape
    matrices = batch_size * key.shape[1], -1, head_size
    scaled = query.float() * scaling
    scores = scaled.reshape(matrices) @ key.float().reshape(matrices).mT
    # not infinity: padding in front of a prompt sees nothing, and is to give no NaN
    unseen = torch.finfo(scores.dtype).min
    scores.view(batch_size, heads, length, -1).masked_fill_(~attention_mask, unseen)
    shares = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    rounded = shares.to(query.dtype).float()
    mixed = rounded @ value.float().reshape(matrices) / shares.sum(-1, keepdim=True)
    mixed_BHQD = mixed.to(query.dtype).view(batch_size, heads, length, head_size)
    return mixed_BHQD.transpose(1, 2).contiguous(), None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """As for PyTorch's attention, but never left out."""
    mask: Tensor | None = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
    return mask


def attend_grouped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """As transformers' for PyTorch's attention; of one token by `grouped_query_attention`."""
    attention: Any = grouped_query_attention
    if query.shape[2] > 1 or attention_mask is None:
        attention = sdpa_attention_forward
    mixed: tuple[Tensor, Tensor | None] = attention(
        module, query, key, value, attention_mask, scaling=scaling, **settings
    )
    return mixed


AttentionInterface.register(IN_FP32, attend)
AttentionMaskInterface.register(IN_FP32, _mask)
AttentionInterface.register(GROUPED, attend_grouped)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class _Norm:
    """The forward pass of a norm; an object of its own, which copies and pickles with its model."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, hidden: Tensor) -> Tensor:
        weight, epsilon = self.module.weight, self.module.variance_epsilon
        out: Tensor = _NormFunction.apply(hidden, weight, epsilon)  # type: ignore[no-untyped-call]
        return out


class _NormFunction(torch.autograd.Function):
    """weight * round(x / sqrt(mean(x^2) + epsilon)), x in FP32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = hidden.float()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        normed = (wide * factor).to(hidden.dtype)
        ctx.save_for_backward(normed, factor, weight)
        return weight * normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, factor, weight = ctx.saved_tensors
        (grad,) = grads
        weight_grad = (grad * normed).flatten(0, -2).sum(0)
        wide, unit = (grad * weight).float(), normed.float()
        wide = (wide - unit * (wide * unit).mean(-1, keepdim=True)) * factor
        return wide.to(grad.dtype), weight_grad, None
