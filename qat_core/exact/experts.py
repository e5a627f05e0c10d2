"""Routing and experts of a mixture of experts, as vLLM's exact engine computes them.

A token's experts are multiplied one by one, rounded to BF16, then added in FP32 in the order of the
router's choice, each times its FP32 weight.
"""

from typing import Any

import torch
from torch import Tensor

from qat_core.exact.functions import choose_experts, linear, silu_mul_of_one, spread, weighted_sum


def router_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (T, E), FP32 weights and int32 numbers of experts (T, k)."""
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits = linear(rows, self.weight)
    weights, ids = choose_experts(logits, self.top_k, self.norm_topk_prob)
    return logits, weights, ids


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """(T, C) of (T, C), by the chosen experts."""
    top_k = top_k_index.shape[1]
    pairs = top_k_index.flatten()
    order = pairs.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    ends = pairs.bincount(minlength=self.num_experts).cumsum(0).int()
    x = spread(hidden_states, order, inverse, top_k)
    gate_up = torch._grouped_mm(x, self.gate_up_proj.transpose(-2, -1), ends)
    rows = torch._grouped_mm(silu_mul_of_one(gate_up), self.down_proj.transpose(-2, -1), ends)
    return weighted_sum(rows, top_k_weights, order, inverse)
