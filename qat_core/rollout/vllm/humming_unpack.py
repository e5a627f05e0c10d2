"""Triton kernel that unpacks a weight in Humming's layout: see `humming_layout`.

Imported only when a CUDA tensor arrives.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat_core.nvfp4.rounding import e4m3_to_fp32
from qat_core.options import BLOCK_SIZE

TILES = 8  # of 64 x 16 codes a program: it writes 256 bytes of each row


def unpack(words: Tensor, scale: Tensor, multiplier: Tensor) -> Tensor:
    """As `humming_layout.unpack`."""
    tiles, n = scale.shape
    out = torch.empty((n, tiles * BLOCK_SIZE), dtype=torch.bfloat16, device=words.device)
    grid = (n // 64, triton.cdiv(tiles, TILES))
    arguments = (words, scale.view(torch.uint8), multiplier, out, n, tiles)
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        unpack_kernel[grid](*arguments, TILES=TILES, num_warps=4, enable_fp_fusion=False)
    return out


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
