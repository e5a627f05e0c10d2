"""Gradients of the exact operators: formulas in FP32, on a GPU compiled or a kernel of ours.

Nothing asks for equal bits here: rollouts have no backward pass.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def fused(formula: Callable[..., Result]) -> Callable[..., Result]:
    """The formula, compiled into few kernels where its first argument is on a GPU."""

    @cache
    def compiled() -> Any:
        return torch.compile(formula, dynamic=True)

    @wraps(formula)
    def run(first: Tensor, *rest: Any) -> Result:
        result: Result = (compiled() if first.is_cuda else formula)(first, *rest)
        return result

    return run


def norm_grads(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Of RMSNorm: x (N, C) and weight (C,)."""
    if x.is_cuda:
        from qat_core.exact import kernels

        return kernels.norm_grads(grad, x, weight, eps)
    x32, grad32 = x.float(), grad.float()
    inverse = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    normed = x32 * inverse
    scaled = grad32 * weight.float()
    grad_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), (grad32 * normed).sum(0).to(weight.dtype)


def silu_mul_grads(
    grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor
) -> None:
    """Of silu(gate) * up, (T, F) each, into the last two."""
    if grad.is_cuda:
        from qat_core.exact import kernels

        kernels.silu_mul_grads(grad, gate, up, grad_gate, grad_up)
        return
    grad32, gate32, sigmoid = grad.float(), gate.float(), torch.sigmoid(gate.float())
    grad_gate.copy_(grad32 * up.float() * sigmoid * (1 + gate32 * (1 - sigmoid)))
    grad_up.copy_(grad32 * gate32 * sigmoid)


def log_prob_grad(grad_T: Tensor, logits: Tensor, ids_T: Tensor, found_T: Tensor) -> Tensor:
    """Of the log-probs `found_T` of `ids_T`: logits (T, V).

    They give the sum over the vocabulary: log-prob = logit - log-sum-exp.
    """
    if logits.is_cuda:
        from qat_core.exact import kernels

        return kernels.log_prob_grad(grad_T, logits, ids_T, found_T)
    log_sum = logits.gather(1, ids_T[:, None]).float() - found_T[:, None]
    is_chosen = torch.arange(logits.shape[-1], device=logits.device) == ids_T[:, None]
    return (grad_T[:, None] * (is_chosen.float() - (logits.float() - log_sum).exp())).to(
        logits.dtype
    )


@fused
def routing_grad(
    grad: Tensor, logits: Tensor, weights: Tensor, ids: Tensor, is_renormalized: bool
) -> Tensor:
    """Of the experts' weights (T, k): logits (T, E).

    Renormalized, they are a softmax over the chosen logits alone.
    """
    grad = grad.float()
    if is_renormalized:
        chosen = weights * (grad - (weights * grad).sum(-1, keepdim=True))
        return torch.zeros_like(logits).scatter(-1, ids.long(), chosen.to(logits.dtype))
    probs = logits.float().softmax(-1)
    spread = torch.zeros_like(probs).scatter(-1, ids.long(), grad)
    return (probs * (spread - (probs * spread).sum(-1, keepdim=True))).to(logits.dtype)


@fused
def weighted_sum_grads(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the sum over a token's experts: rows (T * k, C), sorted by expert, and weights (T, k)."""
    top_k = weights.shape[1]
    grad_rows = grad[order // top_k].float() * weights.flatten()[order][:, None]
    by_token = rows[inverse].view(len(grad), top_k, -1)
    grad_weights = (by_token.float() * grad.float()[:, None]).sum(-1)
    return grad_rows.to(rows.dtype), grad_weights


@fused
def spread_grad(grad: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Of a token's copies for its experts: (T, C) of (T * k, C), sorted by expert."""
    by_token = grad[inverse].view(len(inverse) // top_k, top_k, -1)
    return by_token.float().sum(1).to(grad.dtype)
