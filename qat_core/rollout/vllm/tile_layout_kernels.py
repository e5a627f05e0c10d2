"""Triton kernels into the layouts of Humming and Marlin, and out of them: see `tile_layout`.

Imported only when a CUDA tensor arrives.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat_core.nvfp4 import PackedTensor
from qat_core.nvfp4.rounding import e4m3_to_fp32
from qat_core.options import BLOCK_SIZE

TILES = 8  # of 64 x 16 codes a program: 64 bytes of codes of each row, 256 of BF16


def lay_out_for_humming(codes: Tensor, block_scale: Tensor, words: Tensor, scale: Tensor) -> None:
    """As `tile_layout.lay_out_for_humming`."""
    _launch(humming_kernel, codes, block_scale, words, scale)


def lay_out_for_marlin(
    packed: PackedTensor, words: Tensor, scale: Tensor, multiplier: Tensor
) -> None:
    """As `tile_layout.lay_out_for_marlin`."""
    largest = packed.block_scale.view(torch.uint8).amax()
    others = largest, packed.global_scale.contiguous(), multiplier
    _launch(marlin_kernel, packed.codes, packed.block_scale, words, scale, *others)


def _launch(
    kernel: "triton.JITFunction",
    codes: Tensor,
    block_scale: Tensor,
    words: Tensor,
    scale: Tensor,
    *others: Tensor,
) -> None:
    *experts, n, tiles = block_scale.shape
    sources = codes.contiguous().view(torch.int32), block_scale.contiguous().view(torch.uint8)
    arguments = (*sources, words, scale.view(torch.uint8), *others, n, tiles)
    grid = (n // 64, triton.cdiv(tiles, TILES), prod(experts))
    with torch.cuda.device_of(codes):  # type: ignore[no-untyped-call]
        kernel[grid](*arguments, TILES=TILES, num_warps=4, enable_fp_fusion=False)


def unpack(words: Tensor, scale: Tensor, multiplier: Tensor, *, is_marlins: bool = False) -> Tensor:
    """As `tile_layout.unpack`, or `unpack_marlin`."""
    tiles, n = scale.shape
    out = torch.empty((n, tiles * BLOCK_SIZE), dtype=torch.bfloat16, device=words.device)
    grid = (n // 64, triton.cdiv(tiles, TILES))
    arguments = (words, scale.view(torch.uint8), multiplier, out, n, tiles)
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        unpack_kernel[grid](
            *arguments, MARLIN=is_marlins, TILES=TILES, num_warps=4, enable_fp_fusion=False
        )
    return out


@triton.jit
def humming_kernel(codes_ptr, scale_ptr, words_ptr, out_ptr, n, tiles, TILES: tl.constexpr):
    """Rows 64 i to 64 i + 63 of TILES blocks; dimensions as the layout's description names them."""
    _lay_out_codes(codes_ptr, words_ptr, n, tiles, TILES)
    scale = _load_scale(scale_ptr, n, tiles, TILES)
    scale = tl.reshape(tl.permute(tl.reshape(scale, (8, 8, TILES)), (2, 1, 0)), (TILES, 64))
    _store_scale(out_ptr, scale, n, tiles, TILES)


@triton.jit
def marlin_kernel(
    codes_ptr,
    scale_ptr,
    words_ptr,
    out_ptr,
    largest_ptr,
    global_ptr,
    multiplier_ptr,
    n,
    tiles,
    TILES: tl.constexpr,
):
    """As `humming_kernel`; the first program of an expert writes its multiplier.

    `largest_ptr` has the byte of the largest block scale of all.
    """
    _lay_out_codes(codes_ptr, words_ptr, n, tiles, TILES)
    power = tl.maximum((0x7E - tl.load(largest_ptr).to(tl.int32)) >> 3, 0)
    scale = _load_scale(scale_ptr, n, tiles, TILES).to(tl.int32) + (120 + 8 * power)
    scale = tl.reshape(scale.to(tl.uint8), (2, 2, 2, 8, TILES))  # bits of a; b; j
    scale = tl.reshape(tl.permute(scale, (4, 3, 0, 2, 1)), (TILES, 64))
    _store_scale(out_ptr, scale, n, tiles, TILES)
    if tl.program_id(0) + tl.program_id(1) == 0:
        expert = tl.program_id(2)
        factor = tl.div_rn(1.0, tl.load(global_ptr + expert)) * 6.646139978924579e35  # 2**119
        smaller = ((127 - power) << 23).to(tl.float32, bitcast=True)  # 2**-power
        tl.store(multiplier_ptr + expert, factor * smaller)


@triton.jit
def _lay_out_codes(codes_ptr, words_ptr, n, tiles, TILES: tl.constexpr):
    """Byte t % 4 of four words holds the codes of one word: p0 and p1 say of which four, p2 which.

    A block of a row is read as one number of two words.
    """
    expert, row, tile, inside = _place(n, tiles, TILES)
    of_tile = tl.arange(0, 32)
    row = tl.program_id(0).to(tl.int64) * 64 + of_tile // 8 * 16 + of_tile % 8  # w, t // 4
    block_ptr = (codes_ptr + expert * n * tiles * 2).to(tl.pointer_type(tl.int64))
    upper_ptr = block_ptr + row[:, None] * tiles + tile[None, :]
    lower_ptr = block_ptr + (row + 8)[:, None] * tiles + tile[None, :]
    upper = tl.load(upper_ptr, mask=inside[None, :], other=0)
    lower = tl.load(lower_ptr, mask=inside[None, :], other=0)
    words = _codes_at(upper, 0) | _codes_at(upper >> 32, 1)
    words |= _codes_at(lower, 2) | _codes_at(lower >> 32, 3)
    words = tl.reshape(words, (4, 8, TILES, 4))  # w, t // 4, j, t % 4
    words = tl.reshape(tl.permute(words, (2, 1, 3, 0)), (TILES, 128))
    words_ptr += expert * n * tiles * 2 + tile[:, None] * (2 * n)
    place = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(words_ptr + place[None, :], words, mask=inside[:, None])


@triton.jit
def _codes_at(codes, PLACE: tl.constexpr):
    """Both codes of each byte of words (..., 4), one at PLACE of a word and one four further."""
    byte = codes.to(tl.int32)[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]
    return (byte & 0xF) << (4 * PLACE) | ((byte >> 4) & 0xF) << (4 * PLACE + 16)


@triton.jit
def _load_scale(scale_ptr, n, tiles, TILES: tl.constexpr):
    """Bytes (64, TILES)."""
    expert, row, tile, inside = _place(n, tiles, TILES)
    scale_ptr += expert * n * tiles + row[:, None] * tiles + tile[None, :]
    return tl.load(scale_ptr, mask=inside[None, :], other=0)


@triton.jit
def _store_scale(out_ptr, scale, n, tiles, TILES: tl.constexpr):
    """Bytes (TILES, 64)."""
    expert, row, tile, inside = _place(n, tiles, TILES)
    out_ptr += expert * n * tiles + tile[:, None] * n + row[None, :]
    tl.store(out_ptr, scale, mask=inside[:, None])


@triton.jit
def _place(n, tiles, TILES: tl.constexpr):
    """This program's expert, its 64 rows, its TILES blocks of columns and which of them exist."""
    row = tl.program_id(0).to(tl.int64) * 64 + tl.arange(0, 64)
    tile = (tl.program_id(1) * TILES + tl.arange(0, TILES)).to(tl.int64)
    return tl.program_id(2).to(tl.int64), row, tile, tile < tiles


@triton.jit
def unpack_kernel(
    words_ptr,
    scale_ptr,
    multiplier_ptr,
    out_ptr,
    n,
    tiles,
    MARLIN: tl.constexpr,
    TILES: tl.constexpr,
):
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
    if MARLIN:  # the two lowest bits exchanged
        place = (place & 60) | ((place & 1) << 1) | ((place >> 1) & 1)
    scale_ptr += tile[:, None] * n + row_tile * 64 + place[None, :]
    scale = tl.load(scale_ptr, mask=inside[:, None], other=8)
    if MARLIN:
        half = (scale.to(tl.int16) << 7).to(tl.float16, bitcast=True)
        step = half.to(tl.float32) * (tl.load(multiplier_ptr) * 1.1754943508222875e-38)  # 2**-126
    else:
        step = e4m3_to_fp32(scale) * tl.load(multiplier_ptr)
    step = tl.reshape(step, (TILES, 8, 1, 4, 1, 2, 1))
    value = tl.permute((value * step).to(tl.bfloat16), (3, 5, 1, 0, 6, 2, 4))
    value = tl.reshape(value, (64, TILES * 16))
    row = row_tile.to(tl.int64) * 64 + tl.arange(0, 64)
    column = tl.program_id(1) * (TILES * 16) + tl.arange(0, TILES * 16)
    out_ptr += row[:, None] * (tiles * 16) + column[None, :]
    tl.store(out_ptr, value, mask=(column < tiles * 16)[None, :])
