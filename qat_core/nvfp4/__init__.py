"""NVFP4 codec: E2M1 codes, E4M3 scales for blocks of 16, one FP32 divisor a matrix."""

from qat_core.nvfp4.codec import (
    dequantize,
    dequantize_into,
    fake_quantize,
    global_scale,
    group_amax,
    quantize,
    quantize_all,
    require_finite,
)
from qat_core.nvfp4.format import BLOCK_SIZE, BlockScale, PackedTensor, ScalePolicy

__all__ = [
    "BLOCK_SIZE",
    "BlockScale",
    "PackedTensor",
    "ScalePolicy",
    "dequantize",
    "dequantize_into",
    "fake_quantize",
    "global_scale",
    "group_amax",
    "quantize",
    "quantize_all",
    "require_finite",
]
