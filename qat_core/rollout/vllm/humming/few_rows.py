"""Exact products of few rows with NVFP4 weights in Humming's layout, by `few_rows.cu`.

Humming's own batch-invariant tiles give a warp 32 columns at least, whose codes it unpacks between
two additions; here it is 16, or 8 where they are few, so that more warps share a layer's work.
"""

import ctypes
import math
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qat_core.options import BLOCK_SIZE
from qat_core.rollout.vllm.humming.tiles import NUM_MULTIPROCESSORS


class Tile(NamedTuple):
    """What a block of threads multiplies: rows of x, columns of a weight; by how many warps."""

    rows: int
    columns: int
    warps: int
    together: bool  # by wgmma


# ns that a block takes for 16 numbers of K, on an H200; what of K is fetched at once, if it divides
# K, and in how many stages
TILES = {
    Tile(8, 64, 4, False): (29, 128, 8),
    Tile(16, 32, 4, False): (21, 128, 6),
    Tile(16, 64, 4, False): (35, 128, 6),
    Tile(32, 64, 4, False): (42, 128, 6),
    Tile(64, 64, 4, True): (54, 128, 5),
    Tile(64, 128, 8, True): (80, 128, 6),
    Tile(128, 128, 8, True): (114, 64, 6),
}
# Shared memory of Hopper's multiprocessor, and what of it a block can have.
MULTIPROCESSOR_BYTES, MOST_BYTES = 228 * 1024, 227 * 1024
TILE_ROWS = tuple(sorted({tile.rows for tile in TILES}))


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
    tile = fastest(rows, n)
    arguments = [x, words, scale, multiplier, out, x, x, x, rows, n, k, 1]
    _launch(Kernel.of(tile, k, experts=False), -(-rows // tile.rows), n, arguments)
    return out


def multiply_experts(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    multiplier: Tensor,
    rows: int,
    order: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
) -> None:
    """Rows of x times the weights of their experts, into the rows of pairs of `out`.

    Args:
        x: BF16 (tokens, K), or (pairs, K) of rows that have been through an expert already.
        words, scale, multiplier: of all experts.
        rows: of a tile, of TILE_ROWS.
        order: pairs in the order of tiles, padded; the expert of each tile; how many with padding.
        out: BF16 (pairs, N).
    """
    (pairs, n), k = out.shape, BLOCK_SIZE * scale.shape[-2]
    arguments = [x, words, scale, multiplier, out, *order, pairs, n, k, pairs // len(x)]
    _launch(Kernel.of(widest(rows, n), k, experts=True), len(order[1]), n, arguments)


@cache
def fastest(rows: int, n: int) -> Tile:
    """The tile whose blocks, one a multiprocessor, are done first."""

    def time(tile: Tile) -> int:
        blocks = -(-rows // tile.rows) * (n // tile.columns)
        return TILES[tile][0] * -(-blocks // NUM_MULTIPROCESSORS)

    return min((tile for tile in TILES if n % tile.columns == 0), key=time)


@cache
def widest(rows: int, n: int) -> Tile:
    """The tile of so many rows where blocks are many: that with most columns a warp, then most."""
    fitting = (tile for tile in TILES if tile.rows == rows and n % tile.columns == 0)
    return max(fitting, key=lambda tile: (tile.columns // tile.warps, tile.columns))


class Kernel(NamedTuple):
    """What is compiled: a tile, what of K is fetched at once, and in how many stages."""

    tile: Tile
    stage_k: int
    stages: int
    slices: int  # of K, added in order
    experts: bool

    @classmethod
    def of(cls, tile: Tile, k: int, *, experts: bool, slices: int = 1) -> "Kernel":
        """For sums of length K."""
        _, longest, stages = TILES[tile]
        return cls(tile, math.gcd(longest, k // slices), stages, slices, experts)


def _launch(kernel: Kernel, tiles: int, n: int, arguments: list[Any]) -> None:
    """Of a linear layer, while the kernel in front still runs: few_rows.cu waits for its end."""
    compiled, shared_bytes = _compiled(kernel)
    columns, threads = n // kernel.tile.columns, 32 * kernel.tile.warps
    if not kernel.experts:
        shared_bytes = max(shared_bytes, _evenly_spread(tiles * columns * kernel.slices))
    stream = torch.cuda.current_stream().cuda_stream
    early = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=not kernel.experts)
    grid, block = (tiles, columns, kernel.slices), (threads, 1, 1)
    launch = _Launch(*grid, *block, shared_bytes, stream, ctypes.pointer(early), 1)
    values = [_as_c(value) for value in arguments]
    addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    error = _driver().cuLaunchKernelEx(ctypes.byref(launch), compiled.func, addresses, None)
    assert error == 0, f"CUDA does not launch few_rows.cu: error {error}"


def _evenly_spread(blocks: int) -> int:
    """Bytes of shared memory of a block such that no multiprocessor has room for more than others.

    Blocks that start early gather where the kernel in front ends first: half as fast at 32 rows.
    """
    share = -(-blocks // NUM_MULTIPROCESSORS)
    return min(MOST_BYTES, (MULTIPROCESSOR_BYTES // (share + 1) // 1024 + 1) * 1024)


# The driver's structures, of cuda.h: PyTorch's own launch knows no attributes.
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (
        *(("id", ctypes.c_int), ("padding", ctypes.c_int)),
        *(("value", ctypes.c_int), ("rest", ctypes.c_char * 60)),
    )


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"grid_{axis}", ctypes.c_uint) for axis in "xyz"),
        *((f"block_{axis}", ctypes.c_uint) for axis in "xyz"),
        *(("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p)),
        *(("attributes", ctypes.POINTER(_Attribute)), ("attribute_count", ctypes.c_uint)),
    )


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _as_c(value: Any) -> Any:
    return ctypes.c_void_p(value.data_ptr()) if isinstance(value, Tensor) else ctypes.c_int(value)


def prepare(n: int, k: int, rows: int, experts: bool) -> None:
    """Compiles what products of up to so many rows need, with a weight (N, K).

    Before a graph is captured; of experts, rows of one in the mean.
    """
    if experts:
        tiles = {widest(count, n) for count in TILE_ROWS if count <= tile_rows(rows)}
    else:
        tiles = {fastest(count, n) for count in range(1, rows + 1)}
    for tile in tiles:
        _compiled(Kernel.of(tile, k, experts=experts))


@cache
def _compiled(kernel: Kernel) -> tuple[Any, int]:
    """For the current GPU; and the bytes of shared memory that a block takes."""
    tile, stage_k, stages, slices, experts = kernel
    names = {"ROWS": tile.rows, "COLUMNS": tile.columns, "WARPS": tile.warps}
    names |= {"TOGETHER": int(tile.together), "SLICES": slices}
    names |= {"STAGE_K": stage_k, "STAGES": stages}
    options = [f"-D{name}={value}" for name, value in names.items()]
    compiled = compile_kernel([*options, f"-DEXPERTS={experts:d}"])
    of_step = 9 * max(64, tile.columns)  # bytes of codes and scales
    of_stage = stage_k // 16 * of_step + tile.rows * 2 * stage_k
    shared_bytes = stages * -(-of_stage // 1024) * 1024
    compiled.set_shared_memory_config(MOST_BYTES)
    return compiled, shared_bytes


def compile_kernel(options: list[str]) -> Any:
    """The kernel for Hopper, by NVRTC, which is PyTorch's; no CUDA toolkit is needed."""
    from torch.cuda._utils import _cuda_load_module, _get_nvrtc_library

    source = files(__package__).joinpath("few_rows.cu").read_bytes()
    cubin = _compile(_get_nvrtc_library(), source, ["-arch=sm_90a", "--std=c++17", *options])
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
