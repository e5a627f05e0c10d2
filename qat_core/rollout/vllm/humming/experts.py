"""Experts of vLLM 0.24 multiplied by Humming instead of Marlin; loaded by the plugin alone.

Asked for by `QAT_CORE_EXPERTS_KERNEL=humming`. What is replaced is the layout that weights are
prepared in and the two products of a layer, each sum of which one thread block adds (`tiles.py`).
This file goes together with `linear.py`, if vLLM's own experts by Humming (0.28 has them as
`moe_backend="humming"`) keep their tensors at a sync.
"""

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import TopKWeightAndReduce
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum
from vllm.model_executor.layers.fused_moe.utils import _resize_cache

from qat_core.options import BLOCK_SIZE
from qat_core.rollout.vllm.humming import few_rows
from qat_core.rollout.vllm.humming import library as humming
from qat_core.rollout.vllm.humming.tiles import EXACT, EXACT_ROWS, exact_expert_tiles, expert_tiles
from qat_core.rollout.vllm.switches import is_exact
from qat_core.rollout.vllm.tile_layout import to_layout

FEWEST_ROWS = 8  # of a tile
# Up to a quarter of the experts, pairs seldom share one: a tile of each costs less time than to
# sort them. vLLM's own name and bound, for BF16 experts (`fused_moe.py`).
SPARSITY_FACTOR = 4


class HummingExperts(MarlinExperts):  # type: ignore[misc]
    """W4A16 experts on Hopper; keeps no tensors of its own."""

    _expert_map: Tensor | None = None

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return is_exact()

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
        """As vLLM's; `output`, whose memory is that of `workspace13`, gets each expert's rows.

        Raises:
            ValueError: the model clamps activations or weights the inputs of its experts.
        """
        if apply_router_weight_on_input or self.quant_config.gemm1_clamp_limit is not None:
            raise ValueError(
                "QAT_CORE_EXPERTS_KERNEL=humming: not for experts that clamp or that weight their "
                "inputs; unset it to use Marlin"
            )
        pairs, hidden = topk_ids.numel(), hidden_states.shape[1]
        inner = BLOCK_SIZE * w2.shape[1]
        gate_up = _resize_cache(workspace13, (pairs, w1.shape[2] // 2))
        gated = _resize_cache(workspace2, (pairs, inner))
        routing = _Routing(topk_ids, global_num_experts, expert_map)
        multiply(hidden_states, w1, self.w1_scale, self.g1_alphas, routing, gate_up)
        self.activation(activation, gated, gate_up)
        multiply(gated, w2, self.w2_scale, self.g2_alphas, routing, output.view(pairs, hidden))
        self._expert_map = expert_map

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, *_: Any, **__: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of `workspace13`, `workspace2` and `output`."""
        return (M * topk, 2 * N), (M * topk, N), (M, topk, K)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """Into the layer's own output: vLLM would copy a sum that is in a workspace."""
        return _SumOfExperts(self._expert_map)


class _SumOfExperts(TopKWeightAndReduce):  # type: ignore[misc]
    def __init__(self, expert_map: Tensor | None) -> None:
        self._map = expert_map

    def apply(
        self,
        output: Tensor | None,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
    ) -> Tensor:
        if output is None:
            output = torch.empty_like(fused_expert_output[:, 0])
        moe_fused_mul_sum(fused_expert_output, topk_weights, output, topk_ids, self._map)
        return output


class _Routing:
    """The order in which tiles of some number of rows visit the experts, found once for each.

    Args:
        topk_ids: int32 (tokens, experts of each).
        num_experts: of all ranks.
        expert_map: of an expert's number to that of this rank, or None.
    """

    def __init__(self, topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> None:
        self.topk_ids, self.num_experts, self._map = topk_ids, num_experts, expert_map
        self._orders: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        most = num_experts // SPARSITY_FACTOR
        self._alone = None if expert_map is not None else _pairs_alone(most, topk_ids.device)

    def order(self, tile_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs in the order of tiles, padded; the expert of each tile; how many with padding."""
        if tile_rows not in self._orders:
            self._orders[tile_rows] = self._without_sorting(tile_rows) or moe_align_block_size(
                self.topk_ids, tile_rows, self.num_experts, self._map, ignore_invalid_experts=True
            )
        return self._orders[tile_rows]

    def _without_sorting(self, tile_rows: int) -> tuple[Tensor, Tensor, Tensor] | None:
        pairs = self.topk_ids.numel()
        if self._alone is None or tile_rows != FEWEST_ROWS:
            return None
        ids, padded = self._alone
        if pairs >= len(padded):
            return None
        return ids[: tile_rows * pairs], self.topk_ids.flatten(), padded[pairs : pairs + 1]


@lru_cache
def _pairs_alone(most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For up to `most` pairs a tile of each: its rows, and how many rows n pairs have.

    Made by vLLM's first forward pass, which measures memory: outside of the memory that its sleep
    takes away, and not while a graph is captured, which alone would fill them.
    """
    assert not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    ids = torch.full((most, FEWEST_ROWS), most, dtype=torch.int32, device=device)  # no such pair
    ids[:, 0] = torch.arange(most, device=device)
    padded = FEWEST_ROWS * torch.arange(most + 1, dtype=torch.int32, device=device)
    return ids.flatten(), padded


def multiply(
    x: Tensor, words: Tensor, scale: Tensor, multiplier: Tensor, routing: _Routing, out: Tensor
) -> None:
    """Rows of x times the weights of their experts, in the order of tokens.

    Args:
        x: BF16 (tokens, K), or (pairs, K) of rows that have been through an expert already.
        words, scale: of all experts, (E, K / 16, 2 N) and (E, K / 16, N): `tile_layout`.
        multiplier: FP32 (E,).
        routing: of the layer.
        out: BF16 (pairs, N).
    """
    pairs, experts = routing.topk_ids.numel(), routing.num_experts  # of all ranks, both
    if is_exact() and pairs <= EXACT_ROWS * experts:
        tile = few_rows.tile_rows(pairs, experts)
        few_rows.multiply_experts(x, words, scale, multiplier, tile, routing.order(tile), out)
    else:
        multiply_by_humming(x, words, scale, multiplier, routing, out)


def multiply_by_humming(
    x: Tensor, words: Tensor, scale: Tensor, multiplier: Tensor, routing: _Routing, out: Tensor
) -> None:
    """As `multiply`, of any number of rows."""
    from humming.forward import humming_forward

    experts, blocks, n = scale.shape
    config, compute, tiles, rows = _kernels(experts, n, BLOCK_SIZE * blocks, x.device)
    pairs = routing.topk_ids.numel()
    tile_rows = next(of_tile for up_to, of_tile in rows if pairs <= up_to)
    ids, of_experts, num_padded = routing.order(tile_rows)
    humming_forward(
        config,
        inputs=x,
        outputs=out,
        weight=words,
        weight_scale=scale,
        weight_scale_2=multiplier,
        sorted_ids=ids,
        expert_ids=of_experts,
        num_tokens_padded=num_padded,
        top_k=pairs // len(x),
        valid_shape_m=pairs,
        compute_config=compute,
        tuning_config=tiles,
    )


@lru_cache
def _kernels(
    experts: int, n: int, k: int, device: torch.device
) -> tuple[Any, str, str, tuple[tuple[int, int], ...]]:
    """Humming's configurations, compiled; for each number of pairs the rows of its tile."""
    from humming.kernel.humming import HummingKernel
    from humming.transform import prepare_layer_config

    config = prepare_layer_config(
        n,
        k,
        humming.weight_schema(),
        num_experts=experts,
        torch_dtype=torch.bfloat16,
        device=device,
    )
    computing: dict[str, Any] = {"gemm_type": "indexed"}
    if is_exact():
        few_rows.prepare_experts(n, k, EXACT_ROWS)
        computing, tiles = EXACT | computing, exact_expert_tiles(config, device)
    else:
        tiles = expert_tiles(config, device)
    compute, table = json.dumps(computing), json.dumps(tiles)
    HummingKernel.prepare_kernels(config.to_str(), compute, table, device)
    rows = tuple((up_to, int(tile["block_shape"][0])) for _, up_to, tile in tiles)
    return config, compute, table, rows


def prepare_experts(
    layer: Any,
    w13: Tensor,
    w13_scale: Tensor,
    w13_scale_2: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_scale_2: Tensor,
    is_act_and_mul: bool,
) -> tuple[Tensor, ...]:
    """As vLLM's `prepare_nvfp4_moe_layer_for_marlin`, into Humming's layout; compiles kernels now.

    Arguments and results as for `marlin.prepare_experts`.
    """
    prepared: list[Tensor] = []
    for codes, scale, scale_2 in ((w13, w13_scale, w13_scale_2), (w2, w2_scale, w2_scale_2)):
        prepared += [*to_layout(codes.data, scale.data), scale_2.float()]  # refuses odd sizes
        _kernels(*codes.shape[:2], 2 * codes.shape[2], codes.device)
    return tuple(prepared)


prepare_experts.lays_out_for_humming = True  # type: ignore[attr-defined]


def install() -> None:
    """Make NVFP4 experts that vLLM would multiply with Marlin use `HummingExperts`."""
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle

    if oracle.prepare_nvfp4_moe_layer_for_marlin is prepare_experts:
        return
    vllms_choice = oracle.backend_to_kernel_cls

    def choose(backend: Any) -> Any:
        return [HummingExperts] if backend.name == "MARLIN" else vllms_choice(backend)

    oracle.backend_to_kernel_cls = choose
    oracle.prepare_nvfp4_moe_layer_for_marlin = prepare_experts
