"""Triton kernels of the backward pass; `backward.py` has their formulas."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements of a program at a time: registers of 8 warps
PROGRAMS = 4 * 132  # several for each multiprocessor of an H100 or H200


def norm_grads(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `backward.norm_grads`; each program adds the weight's gradient over its own rows."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    at_once = max(1, TILE // block)
    programs = min(PROGRAMS, triton.cdiv(rows, at_once))
    grad_x = torch.empty_like(x)
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _norm_grads[(programs,)](
        *(grad, x, weight, grad_x, partial),
        *(rows, eps),
        WIDTH=width,
        BLOCK=block,
        AT_ONCE=at_once,
        num_warps=8,
    )
    return grad_x, partial.sum(0).to(weight.dtype)


@triton.jit
def _norm_grads(
    grad_ptr,
    x_ptr,
    weight_ptr,
    grad_x_ptr,
    partial_ptr,
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)
    is_col = cols < WIDTH
    weight = tl.load(weight_ptr + cols, mask=is_col, other=0.0).to(tl.float32)[None]
    grad_weight = tl.zeros([BLOCK], dtype=tl.float32)
    first = tl.program_id(0) * AT_ONCE
    while first < rows:
        row = first + tl.arange(0, AT_ONCE)
        at = row.to(tl.int64)[:, None] * WIDTH + cols[None]
        mask = (row < rows)[:, None] & is_col[None]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        normed, scaled = x * inverse, grad * weight
        mean = (tl.sum(scaled * normed, 1) / WIDTH)[:, None]
        grad_x = inverse * (scaled - normed * mean)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        grad_weight += tl.sum(grad * normed, 0)
        first += tl.num_programs(0) * AT_ONCE
    tl.store(partial_ptr + tl.program_id(0) * WIDTH + cols, grad_weight, mask=is_col)


def silu_mul_grads(
    grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor
) -> None:
    """See `backward.silu_mul_grads`: (T, F) each, the last four perhaps parts of wider tensors."""
    rows, width = grad.shape
    grid = rows, triton.cdiv(width, 1024)
    _silu_mul_grads[grid](
        *(grad, gate, up, grad_gate, grad_up),
        *(width, grad.stride(0), gate.stride(0), grad_gate.stride(0)),
        BLOCK=1024,
    )


@triton.jit
def _silu_mul_grads(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    width,
    grad_stride,
    in_stride,
    out_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < width
    grad = tl.load(grad_ptr + row * grad_stride + col, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + row * in_stride + col, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * in_stride + col, mask=mask).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    kind = grad_gate_ptr.dtype.element_ty
    at = row * out_stride + col
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(grad_gate_ptr + at, grad_gate.to(kind), mask=mask)
    tl.store(grad_up_ptr + at, (grad * gate * sigmoid).to(kind), mask=mask)


def log_prob_grad(grad_T: Tensor, logits: Tensor, ids_T: Tensor, found_T: Tensor) -> Tensor:
    """See `backward.log_prob_grad`: BF16 (T, V)."""
    tokens, vocabulary = logits.shape
    grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _log_prob_grad[tokens, triton.cdiv(vocabulary, TILE)](
        *(grad_T, logits, ids_T, found_T, grad_logits),
        *(vocabulary, logits.stride(0)),
        BLOCK=TILE,
        num_warps=8,
    )
    return grad_logits


@triton.jit
def _log_prob_grad(
    grad_ptr,
    logits_ptr,
    ids_ptr,
    found_ptr,
    grad_logits_ptr,
    vocabulary,
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < vocabulary
    chosen = tl.load(ids_ptr + row)
    log_sum = tl.load(logits_ptr + row * stride + chosen).to(tl.float32) - tl.load(found_ptr + row)
    logits = tl.load(logits_ptr + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    grad_logits = tl.load(grad_ptr + row) * (
        (col == chosen).to(tl.float32) - tl.exp(logits - log_sum)
    )
    kind = grad_logits_ptr.dtype.element_ty
    tl.store(grad_logits_ptr + row * vocabulary + col, grad_logits.to(kind), mask=mask)
