"""Triton kernels into Humming's layout and out of it: see `tile_layout`.

Imported only when a CUDA tensor arrives.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat_core.nvfp4.rounding import e4m3_to_fp32
from qat_core.options import BLOCK_SIZE

TILES = 8  # of 64 x 16 codes a program: 64 bytes of codes of each row, 256 of BF16


def pack(codes: Tensor, block_scale: Tensor) -> tuple[Tensor, Tensor]:
    """As `tile_layout.to_layout`."""
    *experts, n, tiles = block_scale.shape
    words = torch.empty((*experts, tiles, 2 * n), dtype=torch.int32, device=codes.device)
    scale = torch.empty((*experts, tiles, n), dtype=torch.uint8, device=codes.device)
    grid = (n // 64, triton.cdiv(tiles, TILES), prod(experts))
    sources = codes.contiguous().view(torch.int32), block_scale.contiguous().view(torch.uint8)
    with torch.cuda.device_of(codes):  # type: ignore[no-untyped-call]
        pack_kernel[grid](*sources, words, scale, n, tiles, TILES=TILES, num_warps=4)
    return words, scale.view(torch.float8_e4m3fn)


def unpack(words: Tensor, scale: Tensor, multiplier: Tensor) -> Tensor:
    """As `tile_layout.unpack`."""
    tiles, n = scale.shape
    out = torch.empty((n, tiles * BLOCK_SIZE), dtype=torch.bfloat16, device=words.device)
    grid = (n // 64, triton.cdiv(tiles, TILES))
    arguments = (words, scale.view(torch.uint8), multiplier, out, n, tiles)
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        unpack_kernel[grid](*arguments, TILES=TILES, num_warps=4, enable_fp_fusion=False)
    return out


@triton.jit
def pack_kernel(codes_ptr, scale_ptr, words_ptr, out_ptr, n, tiles, TILES: tl.constexpr):
    """Rows 64 i to 64 i + 63 of TILES blocks; dimensions as the layout's description names them."""
    expert = tl.program_id(2).to(tl.int64)
    codes_ptr += expert * n * tiles * 2
    words_ptr += expert * n * tiles * 2
    scale_ptr += expert * n * tiles
    out_ptr += expert * n * tiles
    row_tile = tl.program_id(0)
    first = tl.program_id(1) * TILES
    tile = (first + tl.arange(0, TILES)).to(tl.int64)
    inside = tile < tiles
    row = row_tile.to(tl.int64) * 64 + tl.arange(0, 64)
    half = first * 2 + tl.arange(0, TILES * 2)  # of a block: eight codes in a word
    codes_ptr += row[:, None] * (tiles * 2) + half[None, :]
    codes = tl.load(codes_ptr, mask=(half < tiles * 2)[None, :], other=0)
    code = (codes[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 0xF
    code = tl.reshape(code, (4, 2, 8, TILES, 2, 4, 2))  # w, p1, t // 4, j, p0, t % 4, p2
    code = tl.reshape(tl.permute(code, (3, 2, 5, 0, 6, 1, 4)), (TILES, 128, 8))
    words = tl.sum(code << (tl.arange(0, 8) * 4)[None, None, :], axis=2)
    place = row_tile * 128 + tl.arange(0, 128)
    tl.store(words_ptr + tile[:, None] * (2 * n) + place[None, :], words, mask=inside[:, None])
    scale_ptr += row[:, None] * tiles + tile[None, :]
    scale = tl.reshape(tl.load(scale_ptr, mask=inside[None, :], other=0), (8, 8, TILES))
    scale = tl.reshape(tl.permute(scale, (2, 1, 0)), (TILES, 64))
    place = row_tile * 64 + tl.arange(0, 64)
    tl.store(out_ptr + tile[:, None] * n + place[None, :], scale, mask=inside[:, None])


@triton.jit
def unpack_kernel(words_ptr, scale_ptr, multiplier_ptr, out_ptr, n, tiles, TILES: tl.constexpr):
    """Rows 64 i to 64 i + 63 of TILES blocks; dimensions as the layout's description names them."""
    row_tile = tl.program_id(0)
    tile = (tl.program_id(1) * TILES + tl.arange(0, TILES)).to(tl.int64)
    inside = tile < tiles
    place = tl.arange(0, 128)
    words_ptr += tile[:, None] * (2 * n) + row_tile * 128 + place[None, :]
    words = tl.load(words_ptr, mask=inside[:, None], other=0)
    code = (words[:, :, None] >> (tl.arange(0, 8) * 4)[None, None, :]) & 0xF
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # E2M1 read with FP32's bias
    value = tl.reshape(value, (TILES, 8, 4, 4, 2, 2, 2))  # j, t // 4, t % 4, w, p2, p1, p0
    place = tl.arange(0, 64)
    scale_ptr += tile[:, None] * n + row_tile * 64 + place[None, :]
    scale = tl.load(scale_ptr, mask=inside[:, None], other=8)
    step = e4m3_to_fp32(scale) * tl.load(multiplier_ptr)
    step = tl.reshape(step, (TILES, 8, 1, 4, 1, 2, 1))
    value = tl.permute((value * step).to(tl.bfloat16), (3, 5, 1, 0, 6, 2, 4))
    value = tl.reshape(value, (64, TILES * 16))
    row = row_tile.to(tl.int64) * 64 + tl.arange(0, 64)
    column = tl.program_id(1) * (TILES * 16) + tl.arange(0, TILES * 16)
    out_ptr += row[:, None] * (tiles * 16) + column[None, :]
    tl.store(out_ptr, value, mask=(column < tiles * 16)[None, :])
