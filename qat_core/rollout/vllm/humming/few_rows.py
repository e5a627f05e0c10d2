"""Exact products of few rows with NVFP4 weights in Humming's layout, by `few_rows.cu`.

Humming's own batch-invariant tiles give a warp 32 columns at least, whose codes it unpacks between
two additions; here it is 16, so that more warps share a layer's work.
"""

import ctypes
import math
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

from torch import Tensor

from qat_core.options import BLOCK_SIZE
from qat_core.rollout.vllm.humming.tiles import NUM_MULTIPROCESSORS

TILE_ROWS = (8, 16, 32, 64)
# By the rows of a tile: how much of K is fetched at once, if it divides K, and how often ahead.
STAGES = {8: (256, 4), 16: (256, 4), 32: (256, 3), 64: (64, 6)}


def tile_rows(rows: int) -> int:
    """Rows of the smallest tile that has so many, or of the largest."""
    return next((tile for tile in TILE_ROWS if rows <= tile), TILE_ROWS[-1])


def multiply(x: Tensor, words: Tensor, scale: Tensor, multiplier: Tensor) -> Tensor:
    """x (rows, K) times a weight, BF16 (rows, N).

    Args:
        x: BF16, contiguous.
        words, scale, multiplier: see `tile_layout.unpack`.
    """
    (rows, k), n = x.shape, scale.shape[-1]
    out = x.new_empty(rows, n)
    tile = tile_rows(rows)
    _launch(
        Size(tile, -(-rows // tile), n, k, experts=False),
        [x, words, scale, multiplier, out, x, x, x, rows, n, k, 1],
    )
    return out


def multiply_experts(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    multiplier: Tensor,
    tile: int,
    order: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
) -> None:
    """Rows of x times the weights of their experts, into the rows of pairs of `out`.

    Args:
        x: BF16 (tokens, K), or (pairs, K) of rows that have been through an expert already.
        words, scale, multiplier: of all experts.
        tile: rows of a tile, of TILE_ROWS.
        order: pairs in the order of tiles, padded; the expert of each tile; how many with padding.
        out: BF16 (pairs, N).
    """
    (pairs, n), k = out.shape, BLOCK_SIZE * scale.shape[-2]
    _launch(
        Size(tile, len(order[1]), n, k, experts=True),
        [x, words, scale, multiplier, out, *order, pairs, n, k, pairs // len(x)],
    )


class Size(NamedTuple):
    """Of a product: rows of a tile, how many tiles of them, columns, length of a sum."""

    tile: int
    tiles: int
    n: int
    k: int
    experts: bool

    @property
    def warps(self) -> int:
        """Of a block: twice as many read rows half as often, where blocks are enough."""
        is_often = self.n % 128 == 0 and self.tiles * (self.n // 128) >= 2 * NUM_MULTIPROCESSORS
        return 8 if is_often else 4

    @property
    def stage(self) -> tuple[int, int]:
        """How much of K is fetched at once, and how often ahead."""
        longest, ahead = STAGES[self.tile]
        return math.gcd(longest, self.k), ahead


def _launch(size: Size, arguments: list[Any]) -> None:
    kernel, shared_bytes = _kernel(size.tile, size.warps, *size.stage, size.experts)
    grid = (size.tiles, size.n // (16 * size.warps), 1)
    block = (32 * size.warps, 1, 1)
    kernel(grid=grid, block=block, args=arguments, shared_mem=shared_bytes)


def prepare(n: int, k: int, rows: int, experts: bool) -> None:
    """Compiles what products of up to so many rows need, with a weight (N, K).

    Before a graph is captured; of experts, rows of one in the mean.
    """
    for tile in TILE_ROWS[: TILE_ROWS.index(tile_rows(rows)) + 1]:
        for tiles in (1, 2 * NUM_MULTIPROCESSORS):  # for either number of warps
            size = Size(tile, tiles, n, k, experts)
            _kernel(tile, size.warps, *size.stage, experts)


@lru_cache
def _kernel(tile: int, warps: int, stage_k: int, stages: int, experts: bool) -> tuple[Any, int]:
    """For the current GPU; and the bytes of shared memory that a block takes."""
    names = {"TILES": tile // 8, "WARPS": warps, "STAGE_K": stage_k, "STAGES": stages}
    options = [f"-D{name}={value}" for name, value in names.items()]
    kernel = compile_kernel([*options, f"-DEXPERTS={experts:d}"])
    of_step = 16 * warps * 9  # bytes of codes and scales
    shared_bytes = stages * (stage_k // 16 * of_step + tile * 2 * stage_k)
    kernel.set_shared_memory_config(shared_bytes)
    return kernel, shared_bytes


def compile_kernel(options: list[str]) -> Any:
    """The kernel for Hopper, by NVRTC, which is PyTorch's; no CUDA toolkit is needed."""
    from torch.cuda._utils import _cuda_load_module, _get_nvrtc_library

    source = files(__package__).joinpath("few_rows.cu").read_bytes()
    cubin = _compile(_get_nvrtc_library(), source, ["-arch=sm_90", "--std=c++17", *options])
    return _cuda_load_module(cubin).few_rows  # type: ignore[union-attr]


def _compile(nvrtc: Any, source: bytes, options: list[str]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"few_rows.cu", 0, None, None)
    assert made == 0, "NVRTC makes no program"
    if nvrtc.nvrtcCompileProgram(program, len(options), words):
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"few_rows.cu: {log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw
