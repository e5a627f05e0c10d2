"""Routing and experts of a mixture of experts, as vLLM's exact engine computes them.

A token's experts are multiplied one by one, rounded to BF16, then added in FP32 in the order of the
router's choice, each times its FP32 weight.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qat_core.exact.functions import choose_experts, linear, silu_mul_of_one, spread, weighted_sum
from qat_core.exact.halves import sum_by_halves_of_experts, sum_in_halves


def router_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (T, E), FP32 weights and int32 numbers of experts (T, k)."""
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits = linear(rows, self.weight)
    weights, ids = choose_experts(logits, self.top_k, self.norm_topk_prob)
    return logits, weights, ids


class _Pairs(NamedTuple):
    """Pairs of a token and an expert, sorted by expert: from where, to where, and their ends."""

    order: Tensor
    inverse: Tensor
    ends: Tensor


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """(T, C) of (T, C), by the chosen experts."""
    gated, (order, inverse, ends) = _gated(self, hidden_states, top_k_index)
    rows = torch._grouped_mm(gated, self.down_proj.transpose(-2, -1), ends)
    return weighted_sum(rows, top_k_weights, order, inverse)


def experts_forward_in_halves(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """As two tensor parallel ranks add it."""
    gated, (order, inverse, ends) = _gated(self, hidden_states, top_k_index)
    return sum_in_halves(gated, self.down_proj, ends, top_k_weights, order, inverse)


def experts_forward_by_halves(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """As two expert parallel ranks add it: the first has the first half of the experts."""
    gated, (order, inverse, ends) = _gated(self, hidden_states, top_k_index)
    rows = torch._grouped_mm(gated, self.down_proj.transpose(-2, -1), ends)
    is_first = top_k_index < self.num_experts // 2
    return sum_by_halves_of_experts(rows, top_k_weights, order, inverse, is_first)


def _gated(self: Any, hidden_states: Tensor, top_k_index: Tensor) -> tuple[Tensor, _Pairs]:
    """SwiGLU of the first product of each pair, (T * k, F)."""
    top_k = top_k_index.shape[1]
    numbers = top_k_index.flatten()
    order = numbers.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    experts = torch.arange(self.num_experts, device=order.device, dtype=numbers.dtype)
    ends = torch.searchsorted(numbers[order], experts, right=True, out_int32=True)  # never waits
    x = spread(hidden_states, order, inverse, top_k)
    gate_up = torch._grouped_mm(x, self.gate_up_proj.transpose(-2, -1), ends)
    return silu_mul_of_one(gate_up), _Pairs(order, inverse, ends)
