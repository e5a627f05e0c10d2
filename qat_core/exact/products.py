"""Products of linear layers, which add in an order that both sides know, with their gradients.

A prepared weight is rounded here and multiplied as a plain matrix: through PyTorch's own product it
would be read as a tensor subclass four times a step, which small layers spend more time on than on
all else.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qat_core.exact.once import Once
from qat_core.training.forward_calls import in_backward

Multiply = Callable[[Tensor, Tensor], Tensor]  # BF16 (..., N) of BF16 (..., K) and (N, K)


def whole(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T by cuBLAS, which is told not to split sums (`operators.forbid_split_sums`).

    A single row is multiplied with another: cuBLAS may split its sums, whatever it is told.
    """
    if x.numel() != x.shape[-1]:
        return F.linear(x, weight)
    return with_another_row(F.linear, x, weight)


def with_another_row(multiply: Multiply, x: Tensor, weight: Tensor) -> Tensor:
    """`multiply` of a single row, beside any second one."""
    return multiply(_two_rows(x), weight)[:1].view(*x.shape[:-1], -1)


def _two_rows(x: Tensor) -> Tensor:
    """Two rows (2, K) whose first is x, a single one; the second is any, and costs no copy.

    It is what lies behind x in its memory, where `kernels.norm` has left room for it, or x again.
    """
    row = x.reshape(1, -1)
    end = (row.storage_offset() + 2 * row.shape[-1]) * row.element_size()
    if torch.is_grad_enabled() or not row.is_contiguous() or row.untyped_storage().nbytes() < end:
        return row.expand(2, -1)
    return row.as_strided((2, row.shape[-1]), (row.shape[-1], 1))


class _Product(Once):
    @staticmethod
    def forward(ctx: Any, multiply: Multiply, x: Tensor, weight: Tensor) -> Tensor:
        values = _rounded(weight)
        _, needs_x, needs_weight = ctx.needs_input_grad
        # What gradient checkpointing computes again is multiplied with at once, and what stays
        # until the weight changes costs no memory: neither is rounded, or looked for, twice.
        kept = values if in_backward() or getattr(weight, "stays_rounded", False) else weight
        ctx.save_for_backward(x if needs_weight else None, kept if needs_x else None)
        return multiply(x, values)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = None if weight is None else grad @ _rounded(weight)
        if x is None:
            return None, grad_x, None
        of_rows, rows = (each.reshape(-1, each.shape[-1]) for each in (grad, x))
        return None, grad_x, of_rows.T @ rows


def product_by(multiply: Multiply, x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T by `multiply`, with a prepared weight's rounded values.

    Backward it is one product each, however `multiply` adds, which needs no gradient itself.
    """
    out: Tensor = _Product.apply(multiply, x, weight)  # type: ignore[no-untyped-call]
    return out


def is_prepared(weight: Tensor) -> bool:
    """Whether a weight is computed with rounded: a `FakeQuantizedTensor`."""
    return hasattr(weight, "rounded")


def _rounded(weight: Tensor) -> Tensor:
    return weight.rounded() if is_prepared(weight) else weight  # type: ignore[attr-defined]
