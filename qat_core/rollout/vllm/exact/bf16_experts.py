"""BF16 experts of vLLM 0.24, rounded one by one and then added, as NVFP4 experts are.

vLLM's own multiply by the router's weight before they round. Products are of vLLM's Triton kernel,
which does not split sums along K.
"""

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.fused_moe import (
    invoke_fused_moe_triton_kernel,
    try_get_optimal_moe_config,
)
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum
from vllm.model_executor.layers.fused_moe.utils import _resize_cache
from vllm.triton_utils import tl


class ExactBf16Experts(TritonExperts):  # type: ignore[misc]
    """Selected by `exact.install` in place of `TritonExperts`."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """As vLLM's; the memory of `output` is that of `workspace13`.

        Raises:
            ValueError: the model weights the inputs of its experts, or has biases.
        """
        if apply_router_weight_on_input or self.w1_bias is not None:
            raise ValueError("exact: not for experts that weight their inputs or that have biases")
        tokens, top_k = topk_ids.shape
        pairs, hidden, inner = tokens * top_k, w2.shape[1], w2.shape[2]
        tile = try_get_optimal_moe_config(w1.size(), w2.size(), top_k, None, tokens)
        routing = moe_align_block_size(
            topk_ids, tile["BLOCK_SIZE_M"], global_num_experts, expert_map
        )
        gate_up = _resize_cache(workspace2, (tokens, top_k, 2 * inner))
        gated = _resize_cache(workspace13, (pairs, inner))
        down = _resize_cache(workspace2, (tokens, top_k, hidden))
        _multiply(hidden_states, w1, gate_up, routing, top_k, tile)
        self.activation(activation, gated, gate_up.view(pairs, -1))
        _multiply(gated, w2, down, routing, 1, tile)
        moe_fused_mul_sum(down, topk_weights, output, topk_ids, expert_map)


def _multiply(
    x: Tensor, weight: Tensor, out: Tensor, routing: Any, top_k: int, tile: dict[str, Any]
) -> None:
    """Rows of x times the weights (E, N, K) of their experts; `top_k` of them read one row."""
    invoke_fused_moe_triton_kernel(
        x,
        weight,
        out,
        None,
        None,
        None,
        *routing,
        mul_routed_weight=False,
        top_k=top_k,
        config=tile,
        compute_type=tl.bfloat16,
        use_fp8_w8a8=False,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=False,
    )
