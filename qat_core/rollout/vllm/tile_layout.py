"""NVFP4 weights in the layout that humming-kernels 0.1.19 multiplies with BF16 on sm_90.

A tile is 64 rows by one block of 16 columns: 32 threads hold four words of eight codes each. With
the bits of a code's place in its word named p2 p1 p0, word w of thread t in tile (i, j) has

    row    64 i + 16 w + 8 p1 + t // 4
    column 16 j +  8 p0 + 2 (t % 4) + p2

and the tiles of one j lie side by side. Block scales lie transposed, (K / 16, N), those of rows
8 a + b of 64 at place 8 b + a. Humming's own transformation makes the same bytes (tested on a GPU);
here it needs neither Humming nor a GPU, and can be read back.
"""

import torch
from torch import Tensor

from qat_core.nvfp4 import PackedTensor, dequantize
from qat_core.options import BLOCK_SIZE

ROWS = 64  # of a tile


def to_layout(codes: Tensor, block_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Humming's form of a packed matrix, or of each expert's.

    Args:
        codes: uint8 (N, K / 2), low nibble first; of experts (E, N, K / 2).
        block_scale: E4M3 (N, K / 16) or (E, N, K / 16).

    Returns:
        int32 (K / 16, 2 N) and E4M3 (K / 16, N), with the experts in front.

    Raises:
        ValueError: N is not a multiple of 64 or K not one of 64.
    """
    n, k = codes.shape[-2], 2 * codes.shape[-1]
    if n % ROWS or k % ROWS:
        raise ValueError(f"({n}, {k}): Humming's layout needs multiples of {ROWS}; use Marlin")
    if codes.is_cuda:
        from qat_core.rollout.vllm import tile_layout_kernels

        return tile_layout_kernels.pack(codes, block_scale)
    if codes.ndim == 3:
        each = [to_layout(*of_expert) for of_expert in zip(codes, block_scale, strict=True)]
        return torch.stack([words for words, _ in each]), torch.stack([scale for _, scale in each])
    # rows: i, w (4), p1 (2), t // 4 (8); columns: j, p0 (2), t % 4 (4), p2 (2)
    code = torch.stack([codes & 0xF, codes >> 4], dim=-1).view(n // ROWS, 4, 2, 8, -1, 2, 4, 2)
    code = code.permute(4, 0, 3, 6, 1, 7, 2, 5)  # j, i, t // 4, t % 4, w, p2, p1, p0
    pairs = code[..., 0] | code[..., 1] << 4
    words = pairs.reshape(k // BLOCK_SIZE, 2 * n * 4).view(torch.int32)
    scale = block_scale.view(torch.uint8).view(n // ROWS, 8, 8, -1).permute(3, 0, 2, 1)
    scale = scale.reshape(k // BLOCK_SIZE, n).view(torch.float8_e4m3fn)
    return words, scale


def from_layout(words: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `to_layout`."""
    tiles, n = scale.shape
    pairs = words.view(torch.uint8).view(tiles, n // ROWS, 8, 4, 4, 2, 2)
    code = torch.stack([pairs & 0xF, pairs >> 4], dim=-1).permute(1, 4, 6, 2, 0, 7, 3, 5)
    code = code.reshape(n, tiles * BLOCK_SIZE)
    codes = code[:, ::2] | code[:, 1::2] << 4
    by_row = scale.view(torch.uint8).view(tiles, n // ROWS, 8, 8).permute(1, 3, 2, 0)
    return codes, by_row.reshape(n, tiles).view(torch.float8_e4m3fn)


def unpack(words: Tensor, scale: Tensor, multiplier: Tensor) -> Tensor:
    """The weight in BF16 (N, K), of one in Humming's layout.

    Args:
        words: int32 (K / 16, 2 N).
        scale: E4M3 (K / 16, N).
        multiplier: FP32 (1,), the reciprocal of the global scale. Of a power of two it is exact,
            and so is the result; else products are rounded once more than in `dequantize`.
    """
    if words.is_cuda:
        from qat_core.rollout.vllm import tile_layout_kernels

        return tile_layout_kernels.unpack(words, scale, multiplier)
    codes, by_row = from_layout(words, scale)
    return dequantize(PackedTensor(codes, by_row, multiplier.reciprocal().view(())))
