"""A packed weight in the layout of humming-kernels 0.1.19, and its products with activations.

Humming compiles a kernel for each layer shape and tile: a second or two each, kept in
`HUMMING_CACHE_DIR`. Only those that the given numbers of rows need are compiled here.
"""

import json
from collections.abc import Sequence
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor

from qat_core.nvfp4 import PackedTensor
from qat_core.rollout.vllm.humming.library import NUM_LOCKS, weight_schema
from qat_core.rollout.vllm.humming.tiles import (
    ANY_MORE,
    expert_tiles,
    for_rows,
    linear_tiles,
    tiles_for,
)

Tiling = Literal["default", "unsplit", "invariant", "served"]


class HummingLayer:
    """One weight, dense (N, K) or of experts (E, N, K).

    Args:
        packed: the weight.
        gemm_type: Humming's name: "dense", or "indexed" for experts.
        rows: the numbers of rows that will be multiplied; for experts, (token, expert) pairs.
        tiling: "default"; "unsplit", the same tiles with each sum in one thread block, in FP32,
            where Humming's own choice (stream-K) adds parts of some sums in BF16; "invariant",
            which adds in the order of K, so that a row's result is the same among any rows;
            "served", those that vLLM serves with here.
    """

    def __init__(
        self, packed: PackedTensor, gemm_type: str, rows: Sequence[int], tiling: Tiling
    ) -> None:
        from humming.transform import prepare_and_transform_humming_tensors

        *experts, n, k = packed.shape
        self.config, self.tensors = prepare_and_transform_humming_tensors(
            humming_tensors(packed),
            shape_n=n,
            shape_k=k,
            weight_schema=weight_schema(),
            num_experts=experts[0] if experts else None,
            torch_dtype=torch.bfloat16,
        )
        compute = {"use_batch_invariant": tiling == "invariant", "gemm_type": gemm_type}
        self.tiles = tiles_for(self.config, compute, [1, *rows])  # it always looks up one row
        if tiling == "unsplit":
            whole = {"use_stream_k": False}
            self.tiles = [[low, high, {**tile, **whole}] for low, high, tile in self.tiles]
        elif tiling == "served":
            served = expert_tiles(self.config) if experts else linear_tiles(self.config)
            self.tiles = for_rows(served, [1, *rows])
        self.compute_config, self.tuning_config = json.dumps(compute), json.dumps(self.tiles)
        self.locks = torch.zeros(NUM_LOCKS, dtype=torch.int32, device=packed.codes.device)

    def with_tile(self, tile: dict[str, Any]) -> "HummingLayer":
        """The same weight in the same memory, with this tile for all numbers of rows."""
        other = copy(self)
        other.tiles = [[0, ANY_MORE, tile]]
        other.tuning_config = json.dumps(other.tiles)
        return other

    def compile(self) -> None:
        """Its kernels, which are compiled at the first product else."""
        from humming.kernel.humming import HummingKernel

        device = self.locks.device
        HummingKernel.prepare_kernels(
            self.config.to_str(), self.compute_config, self.tuning_config, device
        )

    def multiply(self, x: Tensor, **routing: Any) -> Tensor:
        """x @ weight.T; BF16 (rows, N) of BF16 (rows, K). `routing` is Humming's, for experts."""
        from humming.forward import humming_forward

        out: Tensor = humming_forward(
            self.config,
            inputs=x,
            locks=self.locks,
            compute_config=self.compute_config,
            tuning_config=self.tuning_config,
            **self.tensors,
            **routing,
        )
        return out

    def tile(self, rows: int) -> dict[str, Any]:
        """Humming's words for the tile that multiplies so many rows."""
        return next(tile for low, high, tile in self.tiles if low < rows <= high)

    def rows_per_tile(self, rows: int) -> int:
        """How many rows of one expert a tile holds: routing has to be padded to it."""
        return int(self.tile(rows)["block_shape"][0])


def humming_tensors(packed: PackedTensor) -> dict[str, Tensor]:
    """What Humming's loader expects: the bytes of `nvfp4-pack-quantized`, seen as its types."""
    return {
        "weight": packed.codes.contiguous().view(torch.int32),
        "weight_scale": packed.block_scale.contiguous(),
        "weight_scale_2": packed.global_scale.reciprocal().reshape(-1),
    }
