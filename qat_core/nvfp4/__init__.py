"""NVFP4 codec: E2M1 codes, E4M3 scales for blocks of 16, one FP32 divisor a matrix."""

from qat_core.nvfp4.codec import (
    dequantize,
    dequantize_into,
    fake_quantize,
    global_scale,
    group_amax,
    is_representable,
    measure_and_round,
    pack_shards,
    quantize,
    quantize_all,
    require_finite,
    unpack_shards,
)
from qat_core.nvfp4.format import PackedTensor, ShardLayout, shard_layout

__all__ = [
    "PackedTensor",
    "ShardLayout",
    "dequantize",
    "dequantize_into",
    "fake_quantize",
    "global_scale",
    "group_amax",
    "is_representable",
    "measure_and_round",
    "pack_shards",
    "quantize",
    "quantize_all",
    "require_finite",
    "shard_layout",
    "unpack_shards",
]
