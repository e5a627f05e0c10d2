"""Exact operators with their gradients, for autograd."""

from typing import Any

import torch
from torch import Tensor

from qat_core.exact.backward import (
    log_prob_grad,
    norm_grads,
    routing_grad,
    silu_mul_grads,
    spread_grad,
    weighted_sum_grads,
)
from qat_core.exact.layout import Layout
from qat_core.exact.once import Once
from qat_core.exact.operators import HeadNorms, operators_for
from qat_core.exact.products import is_prepared, product_by, whole


class _Norm(Once):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return operators_for(x.device.type).norm(x, weight, eps)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        grad_x, grad_weight = norm_grads(grad.reshape(rows.shape), rows, weight, ctx.eps)
        return grad_x.view(x.shape), grad_weight, None


class _Rotate(Once):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, positions_T: Tensor, table: Tensor, head: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(positions_T, table)
        ctx.head = head
        q, k = q.clone(), k.clone()
        operators_for(q.device.type).rotate(positions_T, q, k, table, head)
        return q, k

    @staticmethod
    def gradients(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> Any:
        positions_T, table = ctx.saved_tensors
        grads = _rotated_back(grad_q, grad_k, positions_T, table, ctx.head)
        return *grads, None, None, None


def _rotated_back(
    grad_q: Tensor, grad_k: Tensor, positions_T: Tensor, table: Tensor, head: int
) -> tuple[Tensor, Tensor]:
    cos, sin = table.chunk(2, dim=-1)
    back = torch.cat([cos, -sin], dim=-1)  # by minus the angle
    dense = torch.contiguous_format
    grads = grad_q.clone(memory_format=dense), grad_k.clone(memory_format=dense)
    operators_for(grad_q.device.type).rotate(positions_T, *grads, back, head)
    return grads


class _NormRotate(Once):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        positions_T: Tensor,
        table: Tensor,
    ) -> Any:
        ctx.save_for_backward(q, k, q_weight, k_weight, positions_T, table)
        ctx.eps = eps
        widths, head = [q.shape[1], k.shape[1]], q_weight.numel()
        heads, qk = (widths[0] // head, widths[1] // head, 0), torch.cat([q, k], dim=-1)
        norm_rotate = operators_for(q.device.type).norm_rotate
        norm_rotate(qk, heads, HeadNorms(q_weight, k_weight, eps), positions_T, table)
        return torch.split(qk, widths, dim=-1)

    @staticmethod
    def gradients(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> Any:
        *inputs, q_weight, k_weight, positions_T, table = ctx.saved_tensors
        head = q_weight.numel()
        normed = _rotated_back(grad_q, grad_k, positions_T, table, head)
        (grad_q, grad_q_weight), (grad_k, grad_k_weight) = (
            norm_grads(grad.view(-1, head), x.reshape(-1, head), weight, ctx.eps)
            for grad, x, weight in zip(normed, inputs, (q_weight, k_weight), strict=True)
        )
        of_inputs = grad_q.view(normed[0].shape), grad_k.view(normed[1].shape)
        return *of_inputs, grad_q_weight, grad_k_weight, None, None, None


class _SiluMul(Once):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        rows = (each.reshape(-1, each.shape[-1]) for each in (gate, up))
        return operators_for(gate.device.type).silu_mul(*rows).view(gate.shape)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (each.reshape(-1, each.shape[-1]) for each in ctx.saved_tensors)
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        silu_mul_grads(grad.reshape(gate.shape).contiguous(), gate, up, grad_gate, grad_up)
        return grad_gate.view(grad.shape), grad_up.view(grad.shape)


class _SiluMulOfOne(Once):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return operators_for(gate_up.device.type).silu_mul(*gate_up.chunk(2, dim=-1))

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad_gate_up = torch.empty_like(gate_up)
        inputs, outputs = gate_up.chunk(2, dim=-1), grad_gate_up.chunk(2, dim=-1)
        silu_mul_grads(grad.contiguous(), *inputs, *outputs)
        return grad_gate_up


class _Attend(Once):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float
    ) -> Tensor:
        out, log_sum = operators_for(q.device.type).attend(q, k, v, starts, longest, scale)
        ctx.save_for_backward(q, k, v, out, log_sum, starts)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> Any:
        attend_backward = operators_for(grad.device.type).attend_backward
        grads = attend_backward(grad.contiguous(), ctx.saved_tensors, ctx.longest, ctx.scale)
        return *grads, None, None, None


class _ChooseExperts(Once):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        choose = operators_for(logits.device.type).choose_experts
        weights, ids = choose(logits, top_k, renormalize)
        ctx.save_for_backward(logits, weights, ids)
        ctx.mark_non_differentiable(ids)
        ctx.is_renormalized = renormalize
        return weights, ids

    @staticmethod
    def gradients(ctx: Any, grad: Tensor, _: Any) -> Any:
        return routing_grad(grad, *ctx.saved_tensors, ctx.is_renormalized), None, None


class _Spread(Once):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> Any:
        return spread_grad(grad, *ctx.saved_tensors, ctx.top_k), None, None, None


class _WeightedSum(Once):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        by_token = rows[inverse].view(*weights.shape, rows.shape[-1])
        return operators_for(rows.device.type).weighted_sum(by_token, weights)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> Any:
        return *weighted_sum_grads(grad, *ctx.saved_tensors), None, None


class _LogProbs(Once):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids_T: Tensor, runner: int, vocabulary: int | None
    ) -> Tensor:
        found = operators_for(logits.device.type).log_probs(logits, ids_T, runner, vocabulary)
        ctx.save_for_backward(logits, ids_T, found)
        ctx.vocabulary = vocabulary
        return found

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> Any:
        of_logits = log_prob_grad(grad, *ctx.saved_tensors)
        if ctx.vocabulary is not None:
            of_logits[:, ctx.vocabulary :] = 0
        return of_logits, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T, BF16 (..., N) of BF16 (..., K), rounded before a bias is added."""
    out = product_by(whole, x, weight) if is_prepared(weight) else whole(x, weight)
    return out if bias is None else out + bias


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension of BF16 (..., C)."""
    out: Tensor = _Norm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def rotate(
    q: Tensor, k: Tensor, positions_T: Tensor, table: Tensor, head: int
) -> tuple[Tensor, Tensor]:
    """Rotary embedding of q (T, H * D) and k (T, P * D)."""
    out: tuple[Tensor, Tensor] = _Rotate.apply(q, k, positions_T, table, head)  # type: ignore[no-untyped-call]
    return out


def norm_rotate(
    q: Tensor, k: Tensor, norms: HeadNorms, positions_T: Tensor, table: Tensor
) -> tuple[Tensor, Tensor]:
    """RMSNorm of each head and rotary embedding, rounded once, of q (T, H * D) and k (T, P * D)."""
    out: tuple[Tensor, Tensor] = _NormRotate.apply(q, k, *norms, positions_T, table)  # type: ignore[no-untyped-call]
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, BF16 (..., F), rounded once."""
    out: Tensor = _SiluMul.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def silu_mul_of_one(gate_up: Tensor) -> Tensor:
    """As `silu_mul`, (T, F) of (T, 2 F)."""
    out: Tensor = _SiluMulOfOne.apply(gate_up)  # type: ignore[no-untyped-call]
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """Causal attention (T, H, D) of q (T, H, D), k and v (T, P, D), rows laid out so."""
    arguments = layout.starts, layout.longest, scale
    if layout.rows is None:
        out: Tensor = _Attend.apply(q, k, v, *arguments)  # type: ignore[no-untyped-call]
        return out
    dense = [each[layout.rows] for each in (q, k, v)]
    out = _Attend.apply(*dense, *arguments)  # type: ignore[no-untyped-call]
    return torch.zeros_like(q).index_copy(0, layout.rows, out)


def choose_experts(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """FP32 weights and int32 numbers of experts, (T, k) each, of logits (T, E)."""
    out: tuple[Tensor, Tensor] = _ChooseExperts.apply(logits, top_k, renormalize)  # type: ignore[no-untyped-call]
    return out


def spread(x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Rows of x (T, C) for each pair of a token and an expert, in `order`."""
    out: Tensor = _Spread.apply(x, order, inverse, top_k)  # type: ignore[no-untyped-call]
    return out


def weighted_sum(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """(T, C) of rows (T * k, C) in `order`, and FP32 weights (T, k)."""
    out: Tensor = _WeightedSum.apply(rows, weights, order, inverse)  # type: ignore[no-untyped-call]
    return out


def log_probs(logits: Tensor, ids: Tensor, runner: int, vocabulary: int | None = None) -> Tensor:
    """Log-probs of tokens as vLLM's model runner tells them.

    Args:
        logits: BF16 (..., V), at temperature 1.
        ids: int64 (...).
        runner: 1 or 2, see `model.model_runner`.
        vocabulary: ids from there on are never sampled, as verl makes those that a tokenizer lacks.

    Returns:
        FP32 (...).

    Raises:
        ValueError: shapes that do not fit, logits of another dtype, or no such model runner.
    """
    if logits.dtype != torch.bfloat16 or runner not in (1, 2):
        raise ValueError(
            f"log_probs: got logits in {logits.dtype} and runner {runner}, needs bfloat16 and 1 or "
            "2, see qat_core.exact.model.model_runner"
        )
    if logits.shape[:-1] != ids.shape:
        raise ValueError(
            f"ids: shape {tuple(ids.shape)}, needs that of logits without the vocabulary, "
            f"{tuple(logits.shape[:-1])}"
        )
    flat = logits.reshape(-1, logits.shape[-1])
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    found: Tensor = _LogProbs.apply(flat, ids.reshape(-1).contiguous(), runner, vocabulary)  # type: ignore[no-untyped-call]
    return found.view(ids.shape)
