"""The NVFP4 number format: constants and the packed tensor.

A weight is `code x block_scale / global_scale`: an E2M1 code, one E4M3 scale for every 16 values
along the last dimension, and one FP32 divisor for the whole matrix.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from qat_core.options import BLOCK_SIZE

CODE_BYTES = BLOCK_SIZE // 2  # of a block
BLOCK_BYTES = CODE_BYTES + 1
E2M1_MAX = 6.0
E4M3_MAX = 448.0
# Marlin decodes smaller block scales (E4M3 subnormals) to zero, so they are never produced.
E4M3_MIN_NORMAL = 2.0**-6
# A weight may round up. The next BF16 number does so to infinity in some blocks, with `mse` and a
# power of two as global scale: 6 * 352 / 2**10 * 2**127.
MAX_WEIGHT = (1 + 92 / 128) * 2.0**127
UNREPRESENTABLE = "NaN or infinity (or values above 2.9e38)"
# Keeps block_scale / global_scale, its reciprocal and the division's remainder in FP32's normal
# range. Only groups whose largest weight is below 2**-82 (2e-25) meet it; they lose resolution.
MAX_GLOBAL_SCALE = 2.0**94


class ShardLayout(NamedTuple):
    """Where a rank's rows of a weight lie in the buffer that travels: see `shard_layout`.

    Rows are of the first dimension, matrices where the weight is (E, N, K); padding included.
    """

    num_rows: int
    num_blocks: int
    num_bytes: int


def shard_layout(shape: torch.Size, num_rows: int) -> ShardLayout:
    """Of each shard of a weight of this shape, cut along its first dimension.

    First all codes, then all block scales, in buffers of equal size, for `num_rows` rows: the last
    shards may have fewer. A multiple of 16 bytes keeps the next shard's codes aligned where all are
    gathered.
    """
    num_blocks = num_rows * shape[1:].numel() // BLOCK_SIZE
    return ShardLayout(num_rows, num_blocks, ceil(num_blocks * BLOCK_BYTES / 16) * 16)


@dataclass(frozen=True)
class PackedTensor:
    """A weight (..., N, K) in NVFP4, laid out as compressed-tensors' `nvfp4-pack-quantized`.

    Attributes:
        codes: uint8 (..., N, K / 2), two E2M1 codes a byte, the even element in the low nibble.
        block_scale: float8_e4m3fn (..., N, K / 16), in [2**-6, 448]; NaN marks a block that held
            NaN or infinity.
        global_scale: float32 of the leading dimensions' shape, a divisor.
    """

    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, (..., N, K)."""
        return torch.Size((*self.codes.shape[:-1], 2 * self.codes.shape[-1]))

    @property
    def nbytes(self) -> int:
        """Bytes held: 0.5625 a weight, and 4 a matrix."""
        return self.codes.nbytes + self.block_scale.nbytes + self.global_scale.nbytes

    def to(self, device: torch.device) -> "PackedTensor":
        """The same weight there; itself where it is."""
        if device == self.codes.device:
            return self
        return PackedTensor(
            self.codes.to(device), self.block_scale.to(device), self.global_scale.to(device)
        )
