"""A Triton kernel of our own for BF16 activations and a dense NVFP4 weight: what there is to beat.

It reads the bytes of `nvfp4-pack-quantized` as they are stored, so a weight sync would repack
nothing, and adds in the order of K for every tile, so no tile changes a bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat_core.nvfp4 import PackedTensor


class Tile(NamedTuple):
    """Block sizes of one program, and how it runs."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# Smallest number of rows that the tile is not for. Few rows: many small programs, for bandwidth.
TILES = (
    (17, Tile(16, 64, 256, 4, 4)),
    (33, Tile(32, 64, 256, 4, 4)),
    (65, Tile(64, 64, 128, 4, 4)),
    (129, Tile(128, 64, 128, 4, 4)),
    (2**31, Tile(256, 128, 64, 8, 4)),
)


def multiplier(packed: PackedTensor) -> Callable[[Tensor], Tensor]:
    """The product x @ weight.T, BF16 (rows, N) of BF16 (rows, K); N and K multiples of 128."""
    size_n, size_k = packed.shape
    scale_bytes = packed.block_scale.view(torch.uint8)
    factor = 2.0**26 / packed.global_scale

    def product(x: Tensor) -> Tensor:
        rows = len(x)
        tile = next(tile for above, tile in TILES if rows < above)
        block_k = tile.k if size_k % tile.k == 0 else 128
        out = torch.empty(rows, size_n, dtype=torch.bfloat16, device=x.device)
        grid = (triton.cdiv(rows, tile.m) * triton.cdiv(size_n, tile.n),)
        matmul_kernel[grid](
            x,
            packed.codes,
            scale_bytes,
            factor,
            out,
            rows,
            size_n,
            SIZE_K=size_k,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=block_k,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return out

    return product


@triton.jit
def matmul_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    factor_ptr,
    out_ptr,
    rows,
    size_n,
    SIZE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile (BLOCK_M, BLOCK_N) of the output; N and K are multiples of the blocks."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    m = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_ptrs = x_ptr + tl.minimum(m, rows - 1)[None, :] * SIZE_K + tl.arange(0, BLOCK_K)[:, None]
    code_ptrs = codes_ptr + n[:, None] * (SIZE_K // 2) + tl.arange(0, BLOCK_K // 2)[None, :]
    scale_ptrs = scale_ptr + n[:, None] * (SIZE_K // 16) + tl.arange(0, BLOCK_K // 16)[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for _ in range(0, SIZE_K, BLOCK_K):
        weight = _unpack(tl.load(code_ptrs), tl.load(scale_ptrs), BLOCK_N, BLOCK_K)
        sums = tl.dot(weight, tl.load(x_ptrs), sums)
        x_ptrs += BLOCK_K
        code_ptrs += BLOCK_K // 2
        scale_ptrs += BLOCK_K // 16
    out = tl.trans((sums * tl.load(factor_ptr)).to(tl.bfloat16))
    tl.store(out_ptr + m[:, None] * size_n + n[None, :], out, mask=m[:, None] < rows)


@triton.jit
def _unpack(pair, scale_byte, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """code x block scale x 2**-26 in BF16, exact; (BLOCK_N, BLOCK_K).

    As FP32 bits an E2M1 code is its value x 2**-126 and an E4M3 byte its value x 2**-120; the
    factor 2**220 puts their product into BF16's range.
    """
    pair = tl.reshape(pair, (BLOCK_N, BLOCK_K // 16, 8)).to(tl.int32)
    low = ((pair & 7) << 22) | ((pair & 8) << 28)
    high = ((pair & 0x70) << 18) | ((pair & 0x80) << 24)
    code = tl.join(low, high).to(tl.float32, bitcast=True)  # (BLOCK_N, BLOCK_K / 16, 8, 2)
    scale = (scale_byte.to(tl.int32) << 20).to(tl.float32, bitcast=True)
    scale = scale * 1.3292279957849159e36 * 1.2676506002282294e30  # 2**120 * 2**100
    weight = (code * scale[:, :, None, None]).to(tl.bfloat16)
    return tl.reshape(weight, (BLOCK_N, BLOCK_K))


def compile_for(tile: Tile, capability: int) -> Any:
    """Compile without a GPU: the kernel's PTX and resources for a compute capability."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    pointers = {"x_ptr": "*bf16", "codes_ptr": "*u8", "scale_ptr": "*u8", "factor_ptr": "*fp32"}
    sizes = {"rows": "i32", "size_n": "i32"}
    blocks = {"SIZE_K": 4096, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k}
    signature = {**pointers, "out_ptr": "*bf16", **sizes, **dict.fromkeys(blocks, "constexpr")}
    aligned = [(i,) for i in (0, 1, 2, 4, 6)]
    attributes = {index: [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(matmul_kernel, signature, blocks, attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)
