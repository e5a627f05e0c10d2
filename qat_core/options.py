"""Options of the library, and the block size. Imports nothing heavy: study files need them too."""

from typing import Literal

BLOCK_SIZE = 16
"""Weights that share a block scale, along the input (last) dimension."""

ScalePolicy = Literal["pow2", "amax"]
"""Global scale: the largest power of two that fits, or 2688 times the reciprocal of amax."""

BlockScaleMethod = Literal["max", "four_over_six", "mse"]
"""Block scale: from the block's maximum, or searched for the least squared error."""

CheckpointFormat = Literal["compressed-tensors", "modelopt"]
"""How packed weights are stored."""

Keep = Literal["packed", "rounded"]
"""How `prepare` keeps rounded weights until they change."""

EngineKind = Literal["eager", "vllm"]
"""What samples: transformers in this process, or vLLM."""
