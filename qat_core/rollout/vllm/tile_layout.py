"""NVFP4 weights in the layouts of vLLM 0.24's Marlin and of humming-kernels 0.1.19 on sm_90.

Both hold codes alike. A tile is 64 rows by one block of 16 columns: 32 threads hold four words of
eight codes each. With the bits of a code's place in its word named p2 p1 p0, word w of thread t in
tile (i, j) has

    row    64 i + 16 w + 8 p1 + t // 4
    column 16 j +  8 p0 + 2 (t % 4) + p2

and the tiles of one j lie side by side. Block scales lie transposed, (K / 16, N). Humming has those
of rows 8 a + b of 64 at place 8 b + a, Marlin at the place with the two lowest bits exchanged, and
as other numbers: see `marlin_scales`. Humming's own transformation and vLLM's preparation make the
same bytes (tested on a GPU); here it needs neither of them, and Humming's can be read back.
"""

from functools import lru_cache

import torch
from torch import Tensor

from qat_core.nvfp4 import PackedTensor, dequantize
from qat_core.options import BLOCK_SIZE

ROWS = 64  # of a tile
# By place, the row of 64 whose block scale lies there.
HUMMING_ORDER = tuple(8 * (place % 8) + place // 8 for place in range(ROWS))
MARLIN_ORDER = tuple(
    HUMMING_ORDER[place]
    for four in range(0, ROWS, 4)
    for place in (four, four + 2, four + 1, four + 3)
)
MAX_SCALE_BYTE = 0x7E  # 448


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
    *experts, n, tiles = block_scale.shape
    words = codes.new_empty((*experts, tiles, 2 * n), dtype=torch.int32)
    scale = codes.new_empty((*experts, tiles, n)).view(torch.float8_e4m3fn)
    lay_out_for_humming(codes, block_scale, words, scale)
    return words, scale


def lay_out_for_humming(codes: Tensor, block_scale: Tensor, words: Tensor, scale: Tensor) -> None:
    """As `to_layout`, into the contiguous tensors `words` and `scale`."""
    n, k = codes.shape[-2], 2 * codes.shape[-1]
    if n % ROWS or k % ROWS:
        raise ValueError(
            f"({n}, {k}): Humming's layout needs multiples of {ROWS}; use Marlin: "
            "unset QAT_CORE_LINEAR_KERNEL and QAT_CORE_EXPERTS_KERNEL"
        )
    _require_places(block_scale, words, scale)
    if codes.is_cuda:
        from qat_core.rollout.vllm import tile_layout_kernels

        tile_layout_kernels.lay_out_for_humming(codes, block_scale, words, scale)
        return
    words.copy_(_words(codes))
    scale.view(torch.uint8).copy_(_ordered(block_scale, HUMMING_ORDER))


def lay_out_for_marlin(
    packed: PackedTensor, words: Tensor, scale: Tensor, multiplier: Tensor
) -> None:
    """Writes a weight as vLLM 0.24's Marlin reads it, without waiting for the GPU.

    Args:
        packed: (N, K), or (E, N, K) of experts; N a multiple of 64.
        words: int32 (K / 16, 2 N), written; these tensors are contiguous, with experts in front.
        scale: one byte an element (K / 16, N), written.
        multiplier: FP32 of one element, or (E,), written.
    """
    _require_places(packed.block_scale, words, scale)
    assert multiplier.is_contiguous() and multiplier.numel() == packed.global_scale.numel()
    if packed.codes.is_cuda:
        from qat_core.rollout.vllm import tile_layout_kernels

        tile_layout_kernels.lay_out_for_marlin(packed, words, scale, multiplier)
        return
    words.copy_(_words(packed.codes))
    scales, power = marlin_scales(packed.block_scale)
    scale.view(torch.uint8).copy_(scales)
    multiplier.copy_(marlin_multiplier(packed.global_scale, power))


def marlin_scales(block_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Block scales as Marlin reads them.

    Marlin's form of s is the high byte of the FP16 bits of 128 * 2**p * s, shifted left by one,
    where 2**p is the largest power of two that keeps every scale up to 448. For the scales that are
    packed here, E4M3 numbers in [2**-6, 448], that adds 120 + 8 p to their byte.

    Args:
        block_scale: E4M3 (N, K / 16), or (E, N, K / 16) of experts, which share p.

    Returns:
        uint8 (..., K / 16, N) and p, int32 0-D.
    """
    largest = block_scale.view(torch.uint8).amax().int()
    power = ((MAX_SCALE_BYTE - largest) >> 3).clamp(min=0)
    return _ordered(block_scale, MARLIN_ORDER) + (120 + 8 * power).to(torch.uint8), power


def marlin_multiplier(global_scale: Tensor, power: Tensor) -> Tensor:
    """Marlin's form of a divisor, FP32: with the exponents that its codes and scales lack."""
    return torch.ldexp(global_scale.reciprocal() * 2.0**119, -power)


def from_layout(words: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `to_layout`."""
    return _codes(words), _by_row(scale, HUMMING_ORDER).view(torch.float8_e4m3fn)


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


def unpack_marlin(words: Tensor, scale: Tensor, multiplier: Tensor) -> Tensor:
    """As `unpack`, of a weight in Marlin's layout: see `marlin_scales`, `marlin_multiplier`."""
    if words.is_cuda:
        from qat_core.rollout.vllm import tile_layout_kernels

        return tile_layout_kernels.unpack(words, scale, multiplier, is_marlins=True)
    half = (_by_row(scale, MARLIN_ORDER).short() << 7).view(torch.float16)
    block_scale = (half.float() / 128).to(torch.float8_e4m3fn)
    factor = multiplier.reshape(()) * 2.0**-119
    return dequantize(PackedTensor(_codes(words), block_scale, factor.reciprocal()))


def _require_places(block_scale: Tensor, words: Tensor, scale: Tensor) -> None:
    """Kernels write without a look at where a tensor ends."""
    *experts, n, tiles = block_scale.shape
    shapes = (*experts, tiles, 2 * n), (*experts, tiles, n)
    are_contiguous = words.is_contiguous() and scale.is_contiguous()
    if n % ROWS or (words.shape, scale.shape) != shapes or not are_contiguous:
        raise ValueError(
            f"{(*experts, n, BLOCK_SIZE * tiles)} is sent, the kernel has codes "
            f"{tuple(words.shape)} and block scales {tuple(scale.shape)}"
        )


def _words(codes: Tensor) -> Tensor:
    """Codes (..., N, K / 2) as words (..., K / 16, 2 N)."""
    if codes.ndim == 3:
        return torch.stack([_words(of_expert) for of_expert in codes])
    n, half_k = codes.shape
    # rows: i, w (4), p1 (2), t // 4 (8); columns: j, p0 (2), t % 4 (4), p2 (2)
    code = torch.stack([codes & 0xF, codes >> 4], dim=-1).view(n // ROWS, 4, 2, 8, -1, 2, 4, 2)
    code = code.permute(4, 0, 3, 6, 1, 7, 2, 5)  # j, i, t // 4, t % 4, w, p2, p1, p0
    pairs = code[..., 0] | code[..., 1] << 4
    return pairs.reshape(2 * half_k // BLOCK_SIZE, 2 * n * 4).view(torch.int32)


def _codes(words: Tensor) -> Tensor:
    """Inverse of `_words`, of a matrix."""
    tiles, n = len(words), words.shape[1] // 2
    pairs = words.view(torch.uint8).view(tiles, n // ROWS, 8, 4, 4, 2, 2)
    code = torch.stack([pairs & 0xF, pairs >> 4], dim=-1).permute(1, 4, 6, 2, 0, 7, 3, 5)
    code = code.reshape(n, tiles * BLOCK_SIZE)
    return code[:, ::2] | code[:, 1::2] << 4


def _by_row(scale: Tensor, order: tuple[int, ...]) -> Tensor:
    """Inverse of `_ordered`, of a matrix: bytes (N, K / 16)."""
    rows = torch.empty_like(scale.view(torch.uint8)).view(-1, ROWS)
    rows[:, _on_device(order, scale.device)] = scale.view(torch.uint8).view(-1, ROWS)
    return rows.view(scale.shape).T.contiguous()


def _ordered(block_scale: Tensor, order: tuple[int, ...]) -> Tensor:
    """Bytes of block scales (..., N, K / 16) as (..., K / 16, N), rows of 64 in this order."""
    transposed = block_scale.view(torch.uint8).transpose(-1, -2)
    rows = transposed.reshape(-1, ROWS)[:, _on_device(order, block_scale.device)]
    return rows.view(transposed.shape)


@lru_cache
def _on_device(order: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(order, device=device)
