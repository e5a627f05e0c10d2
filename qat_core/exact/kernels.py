"""Triton kernels: RMSNorm and SwiGLU as trainer and engine compute them; the backward pass.

`backward.py` has the formulas of the latter. A row's sum is added in one order, whatever the other
rows are: a program's tile depends on the width of rows alone.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # elements of a program at a time: registers of 8 warps
PROGRAMS = 4 * 132  # several for each multiprocessor of an H100 or H200


def norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension, rounded once, of x or of the rounded sum with a residual.

    Args:
        x, residual: BF16 (..., C), of any strides in up to two dimensions of rows.
        weight: BF16 (C,).
        eps: added to the mean square.

    Returns:
        What is normed, and what was: the sum, or x itself. BF16 (..., C), contiguous.
    """
    shape, width = x.shape, x.shape[-1]
    x = _rows_by_two(x)
    outer, inner, _ = x.shape
    block = triton.next_power_of_2(width)
    at_once = max(1, TILE // block)
    # at least two rows: see `products.with_another_row`
    room = torch.empty(max(2, outer * inner), width, dtype=x.dtype, device=x.device)
    normed = room[: outer * inner].view(x.shape)
    summed = x if residual is None else torch.empty_like(normed)
    other = x if residual is None else _rows_by_two(residual)
    _norm[triton.cdiv(outer * inner, at_once),](
        *(x, other, weight, normed, summed),
        *(outer * inner, eps, inner, *x.stride()[:2], *other.stride()[:2]),
        WIDTH=width,
        BLOCK=block,
        AT_ONCE=at_once,
        HAS_RESIDUAL=residual is not None,
        num_warps=8,
    )
    return normed.view(shape), summed.view(shape) if residual is not None else x.view(shape)


def _rows_by_two(x: Tensor) -> Tensor:
    """x as (outer, inner, C), a copy only where strides ask for one."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    if x.ndim == 3:
        return x
    return x[:, None] if x.ndim == 2 else x.reshape(-1, 1, x.shape[-1])


@triton.jit
def _norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    summed_ptr,
    rows,
    eps,
    rows_of_outer,  # not a constant: that compiles again for each number of tokens
    outer_stride,
    inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    cols = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (cols < WIDTH)[None]
    outer, inner = (row // rows_of_outer).to(tl.int64), (row % rows_of_outer).to(tl.int64)
    out_at = row.to(tl.int64)[:, None] * WIDTH + cols[None]
    at = (outer * outer_stride + inner * inner_stride)[:, None] + cols[None]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        other_at = outer * residual_outer_stride + inner * residual_inner_stride
        other = tl.load(residual_ptr + other_at[:, None] + cols[None], mask=mask, other=0.0)
        summed = (x + other.to(tl.float32)).to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + out_at, summed, mask=mask)
        x = summed.to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)[None]
    inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    normed = x * inverse * weight
    tl.store(normed_ptr + out_at, normed.to(normed_ptr.dtype.element_ty), mask=mask)


def norm_grads(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `backward.norm_grads`; each program adds the weight's gradient over its own rows."""
    rows, width = x.shape
    grad, x = grad.contiguous(), x.contiguous()  # a sum's gradient is one number, spread out
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


def silu_mul(gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up, rounded once.

    Args:
        gate, up: BF16 (T, F), of the same strides, perhaps parts of a wider tensor.
        out: BF16 (T, F), contiguous, or None to make it.
    """
    rows, width = gate.shape
    assert gate.stride() == up.stride() == (gate.stride(0), 1), "read by one stride"
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device) if out is None else out
    grid = rows, triton.cdiv(width, 1024)
    _silu_mul[grid](gate, up, out, width, gate.stride(0), BLOCK=1024)
    return out


@triton.jit
def _silu_mul(gate_ptr, up_ptr, out_ptr, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < width
    gate = tl.load(gate_ptr + row * stride + col, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + row * stride + col, mask=mask).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + col, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul_grads(
    grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor
) -> None:
    """See `backward.silu_mul_grads`: (T, F) each, the last four perhaps parts of wider tensors."""
    rows, width = grad.shape
    assert gate.stride() == up.stride() and grad_gate.stride() == grad_up.stride()
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
    grad_T = grad_T.contiguous()  # as in `norm_grads`
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
