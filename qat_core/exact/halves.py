"""Sums that two tensor parallel ranks of vLLM share out: each has half of K and rounds to BF16.

Then all ranks add what each has. Of two BF16 numbers all ways to add give the same bits: whichever
comes first, and rounded from FP32 or at once, as FP32's 24 bits are more than twice BF16's 8 and
two. A sum of more numbers has an order, which libraries choose by size and machine: refused.
vLLM's embedding is such a sum too, with a row of zeros: it loses the sign of a zero, as the first
product does in any case.

A product of experts is an operator of its own, so that fake-quantized weights come rounded and
whole: a half of one could not be rounded. Backward each is one product, as without ranks.
"""

from typing import Any

import torch
from torch import Tensor

from qat_core.exact.backward import weighted_sum_grads
from qat_core.exact.functions import weighted_sum
from qat_core.exact.once import Once
from qat_core.exact.operators import operators_for
from qat_core.exact.products import product_by
from qat_core.exact.slices import add_up


def _linear_in_halves(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    first, second = map(add_up, rows.chunk(2, dim=-1), weight.chunk(2, dim=-1))
    return (first + second).view(*x.shape[:-1], len(weight))


@torch.library.custom_op("qat_core::experts_in_halves", mutates_args=())
def _experts_in_halves(x: Tensor, weight: Tensor, ends: Tensor) -> list[Tensor]:
    halves = zip(x.chunk(2, dim=-1), weight.chunk(2, dim=-1), strict=True)
    return [torch._grouped_mm(part, matrices.mT, ends) for part, matrices in halves]


class _SumOfExperts(Once):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        weights: Tensor,
        order: Tensor,
        inverse: Tensor,
    ) -> Tensor:
        of_experts = operators_for(x.device.type).weighted_sum
        halves = _experts_in_halves(x, weight, ends)
        ctx.save_for_backward(x, weight, ends, halves[0] + halves[1], weights, order, inverse)
        first, second = (
            of_experts(rows[inverse].view(*weights.shape, rows.shape[-1]), weights)
            for rows in halves
        )
        return first + second

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> Any:
        x, weight, ends, *of_sum = ctx.saved_tensors
        grad_rows, grad_weights = weighted_sum_grads(grad, *of_sum)
        grad_x = torch._grouped_mm(grad_rows, weight, ends)
        grad_weight = torch._grouped_mm(grad_rows.T, x, ends)
        return grad_x, grad_weight, None, grad_weights, None, None


def linear_in_halves(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, BF16 (..., N) of BF16 (..., K), K even, as two ranks add it."""
    return product_by(_linear_in_halves, x, weight)


def sum_in_halves(
    x: Tensor, weight: Tensor, ends: Tensor, weights: Tensor, order: Tensor, inverse: Tensor
) -> Tensor:
    """The sum over a token's experts of their last product, as two ranks with half of K add it.

    Args:
        x: BF16 (T * k, F), F even, sorted by expert.
        weight: BF16 (E, C, F).
        ends: int32 (E,), where the rows of each expert end.
        weights, order, inverse: see `functions.weighted_sum`.

    Returns:
        BF16 (T, C).
    """
    out: Tensor = _SumOfExperts.apply(x, weight, ends, weights, order, inverse)  # type: ignore[no-untyped-call]
    return out


def sum_by_halves_of_experts(
    rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, is_first: Tensor
) -> Tensor:
    """As `functions.weighted_sum`, as two expert parallel ranks add it, which have other experts.

    Args:
        rows, weights, order, inverse: see there.
        is_first: bool (T, k), whether the first rank has the expert.
    """
    first, second = (
        weighted_sum(rows, weights.masked_fill(others, 0), order, inverse)
        for others in (~is_first, is_first)
    )
    return first + second
