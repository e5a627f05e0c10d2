"""Ways to multiply the BF16 activations of routed tokens with the NVFP4 weights of experts.

Each takes the weights once and returns a product of (x, routing). Sorting the routed rows is left
out of the times: every way needs it, vLLM does it once for both products of a layer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks.products.dense import shared_buffer
from experiments.benchmarks.products.humming_layer import HummingLayer, Tiling
from experiments.benchmarks.products.layers import Layer
from qat_core.nvfp4 import PackedTensor, dequantize_into

MARLIN_ROWS_PER_TILE = (8, 16, 32, 48, 64)  # vLLM's choice, `fused_marlin_moe`


class Routing:
    """Which experts each token visits, and the row orders that follow from it.

    Attributes:
        experts: int32 (tokens, experts a token).
        pairs: of a token and an expert.
        pairs_per_row: how many of them read one row of x: vLLM's `top_k` of a product.
        order: the pairs sorted by expert; source_rows: the rows of x that they read.
        ends: int32 (experts,), where each expert's pairs end in that order.
        experts_hit: how many different experts are visited.
        ones: FP32 (tokens, experts a token), weights that change nothing.
    """

    def __init__(self, experts: Tensor, num_experts: int, rows_per_token: int) -> None:
        self.experts, self.num_experts = experts, num_experts
        self.pairs = experts.numel()
        self.pairs_per_row = experts.shape[1] // rows_per_token
        self.order = experts.flatten().argsort(stable=True)  # pairs, sorted by expert
        counts = experts.flatten().bincount(minlength=num_experts)
        self.ends = counts.cumsum(0).int()
        self.experts_hit = int((counts > 0).sum())
        self.source_rows = self.order // self.pairs_per_row
        self.ones = torch.ones(experts.shape, dtype=torch.float32, device=experts.device)
        self._padded: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def padded(self, rows_per_tile: int) -> tuple[Tensor, Tensor, Tensor]:
        """vLLM's order: pairs by expert, each expert padded to whole tiles; computed once."""
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

        if rows_per_tile not in self._padded:
            self._padded[rows_per_tile] = moe_align_block_size(
                self.experts, rows_per_tile, self.num_experts, ignore_invalid_experts=True
            )
        return self._padded[rows_per_tile]


Product = Callable[[Tensor, Routing], Tensor]


def random_routing(layer: Layer, tokens: int, device: str, copies: int) -> list[Routing]:
    """Uniform routing for several batches; few tokens visit different experts each time."""
    visits = copies * tokens
    if visits * layer.experts_per_token <= layer.experts:
        drawn = torch.randperm(layer.experts, device=device)[: visits * layer.experts_per_token]
    else:
        scores = torch.rand(visits, layer.experts, device=device)
        drawn = scores.topk(layer.experts_per_token).indices
    batches = drawn.int().view(copies, tokens, layer.experts_per_token)
    return [Routing(batch, layer.experts, layer.rows_per_token) for batch in batches]


def grouped_bf16(
    layer: Layer, packed: PackedTensor, weight: Tensor, rows: Sequence[int]
) -> Product:
    """PyTorch's grouped product on BF16 weights; its rows stay sorted by expert."""
    transposed = weight.transpose(-2, -1)
    return lambda x, routing: torch._grouped_mm(x[routing.source_rows], transposed, routing.ends)


def dequantize_grouped(
    layer: Layer, packed: PackedTensor, weight: Tensor, rows: Sequence[int]
) -> Product:
    """Unpack all experts into a buffer that all layers share, then the grouped product."""
    buffer = shared_buffer(tuple(weight.shape), weight.device)
    transposed = buffer.transpose(-2, -1)

    def product(x: Tensor, routing: Routing) -> Tensor:
        dequantize_into(packed, buffer)
        return torch._grouped_mm(x[routing.source_rows], transposed, routing.ends)

    return product


def triton_bf16(layer: Layer, packed: PackedTensor, weight: Tensor, rows: Sequence[int]) -> Product:
    """vLLM's kernel for BF16 experts, with its tuned tiles where it has some for this GPU."""
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.triton_utils import tl

    inner = layer.k if layer.name == "down" else layer.n // 2
    hidden = layer.n if layer.name == "down" else layer.k
    shapes = (layer.experts, 2 * inner, hidden), (layer.experts, hidden, inner)

    def product(x: Tensor, routing: Routing) -> Tensor:
        tokens, top_k = routing.experts.shape
        tile = fused_moe.try_get_optimal_moe_config(*shapes, top_k, None, tokens)
        ids, experts, num_padded = routing.padded(tile["BLOCK_SIZE_M"])
        out = x.new_empty(tokens, top_k, layer.n)
        fused_moe.invoke_fused_moe_triton_kernel(
            x,
            weight,
            out,
            None,
            None,
            None,
            ids,
            experts,
            num_padded,
            mul_routed_weight=False,
            top_k=routing.pairs_per_row,
            config=tile,
            compute_type=tl.bfloat16,
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
        )
        return out.view(-1, layer.n)

    return product


def marlin(layer: Layer, packed: PackedTensor, weight: Tensor, rows: Sequence[int]) -> Product:
    """vLLM's W4A16 kernel for experts of today."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    from qat_core.rollout.vllm.marlin.layout import permute_scales, repack_codes

    codes = repack_codes(packed.codes)
    multiplier = packed.global_scale.reciprocal()
    scales, multipliers = permute_scales(packed.block_scale, multiplier, torch.bfloat16)
    workspace = marlin_utils.marlin_make_workspace_new(codes.device, 4)

    def product(x: Tensor, routing: Routing) -> Tensor:
        per_expert = routing.pairs / layer.experts
        sizes = (size for size in MARLIN_ROWS_PER_TILE if per_expert / size < 0.9)
        rows_per_tile = next(sizes, MARLIN_ROWS_PER_TILE[-1])
        ids, experts, num_padded = routing.padded(rows_per_tile)
        out: Tensor = ops.moe_wna16_marlin_gemm(
            x,
            x.new_empty(routing.pairs, layer.n),
            codes,
            None,
            scales,
            None,
            multipliers,
            None,
            None,
            None,
            workspace,
            ids,
            experts,
            num_padded,
            routing.ones,
            moe_block_size=rows_per_tile,
            top_k=routing.pairs_per_row,
            mul_topk_weights=False,
            b_q_type=scalar_types.float4_e2m1f,
            size_m=len(x),
            size_n=layer.n,
            size_k=layer.k,
            is_k_full=True,
            use_atomic_add=False,
            use_fp32_reduce=True,
            is_zp_float=False,
        )
        return out

    return product


def humming(
    layer: Layer,
    packed: PackedTensor,
    weight: Tensor,
    rows: Sequence[int],
    *,
    tiling: Tiling = "default",
) -> Product:
    """humming-kernels, routed by the same padded order as vLLM's own use of it."""
    return partial(multiply_routed, HummingLayer(packed, "indexed", rows, tiling))


def multiply_routed(layer: HummingLayer, x: Tensor, routing: Routing) -> Tensor:
    """The rows of x times the weights of their experts, by Humming."""
    ids, experts, num_padded = routing.padded(layer.rows_per_tile(routing.pairs))
    return layer.multiply(
        x,
        sorted_ids=ids,
        expert_ids=experts,
        num_tokens_padded=num_padded,
        top_k=routing.pairs_per_row,
        valid_shape_m=routing.pairs,
    )


ARMS: dict[str, Callable[..., Any]] = {
    "triton bf16": triton_bf16,
    "grouped bf16": grouped_bf16,
    "dequantize + grouped bf16": dequantize_grouped,
    "marlin": marlin,
    "humming": humming,
    "humming unsplit": partial(humming, tiling="unsplit"),
    "humming invariant": partial(humming, tiling="invariant"),
    "humming served": partial(humming, tiling="served"),
}
SORTED_BY_EXPERT = ("grouped bf16", "dequantize + grouped bf16")


def in_token_order(arm: str, out: Tensor, routing: Routing) -> Tensor:
    """An arm's output with its rows by token, then by the token's experts."""
    if arm not in SORTED_BY_EXPERT:
        return out
    return torch.empty_like(out).index_copy_(0, routing.order, out)
