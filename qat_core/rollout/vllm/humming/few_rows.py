"""Exact products of few rows with NVFP4 weights in Humming's layout, by `few_rows.cu`.

Humming's own batch-invariant tiles give a warp 32 columns at least, whose codes it unpacks between
two additions; here it is 16, or 8 where they are few, so that more warps share a layer's work.
"""

import ctypes
import math
import warnings
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from torch import Tensor

from qat_core.options import BLOCK_SIZE
from qat_core.rollout.vllm.humming.tiles import NUM_MULTIPROCESSORS

TOGETHER_FROM = 32  # rows of a tile that four warps multiply together
BARRIER_BYTES = 8


class Tile(NamedTuple):
    """What a block of threads multiplies: rows of x, columns of a weight; by how many warps."""

    rows: int
    columns: int
    warps: int

    @property
    def threads(self) -> int:
        """With those that do nothing but copy, see few_rows.cu."""
        return 32 * self.warps + 128 * (self.rows >= TOGETHER_FROM)


# ns that a multiprocessor takes for 16 numbers of K, on an H200: of one block, of each more; what
# of K is fetched at once, if it divides K, and in how many stages
TILES = {
    Tile(8, 64, 4): (44, 19, 128, 6),
    Tile(16, 32, 4): (41, 16, 128, 6),
    Tile(16, 64, 4): (54, 21, 128, 5),
    Tile(32, 64, 4): (56, 43, 128, 5),
    Tile(32, 128, 8): (84, 54, 128, 5),
    Tile(32, 192, 12): (117, 98, 128, 5),
    Tile(64, 64, 4): (61, 39, 128, 5),
    Tile(64, 128, 8): (92, 79, 128, 6),
    Tile(64, 192, 12): (134, 113, 128, 5),
    Tile(128, 128, 8): (124, 108, 128, 4),
    Tile(128, 192, 12): (186, 159, 64, 6),
}
# Of experts, by rows: in fewer stages more blocks are there at once, as with fewer columns.
EXPERT_STAGES = {8: 4, 16: 4, 32: 5}
EXPERT_COLUMNS = 128


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of the smallest tile that holds 1.5 times an expert's mean pairs; else of the largest.

    Most experts have no more than that.
    """
    return next(
        (rows for rows in EXPERT_STAGES if 3 * pairs <= 2 * rows * experts), max(EXPERT_STAGES)
    )


def multiply(
    x: Tensor, words: Tensor, scale: Tensor, multiplier: Tensor, slices: int = 1
) -> Tensor:
    """x (rows, K) times a weight, BF16 (rows, N).

    Args:
        x: BF16, contiguous.
        words, scale, multiplier: see `tile_layout.unpack`.
        slices: of K, see `qat_core.exact.slices`.
    """
    (rows, k), n = x.shape, scale.shape[-1]
    out = x.new_empty(rows, n)
    tile = fastest(rows, n, slices)
    arguments = [x, words, scale, multiplier, out, x, x, x, rows, n, k, 1]
    _launch(Kernel.of(tile, k, slices=slices), -(-rows // tile.rows), n, arguments)
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
        rows: of a tile, of EXPERT_STAGES.
        order: pairs in the order of tiles, padded; the expert of each tile; how many with padding.
        out: BF16 (pairs, N).
    """
    (pairs, n), k = out.shape, BLOCK_SIZE * scale.shape[-2]
    arguments = [x, words, scale, multiplier, out, *order, pairs, n, k, pairs // len(x)]
    _launch(Kernel.of(widest(rows, n), k, experts=True), len(order[1]), n, arguments)


@cache
def fastest(rows: int, n: int, slices: int) -> Tile:
    """The tile whose blocks are done first."""

    def time(tile: Tile) -> int:
        blocks = -(-rows // tile.rows) * (n // tile.columns) * slices
        of_one, of_more, _, _ = TILES[tile]
        return of_one + of_more * ((blocks - 1) // NUM_MULTIPROCESSORS)

    return min((tile for tile in TILES if n % tile.columns == 0), key=time)


@cache
def widest(rows: int, n: int) -> Tile:
    """The tile of so many rows where blocks are many: that with most columns a warp, then most."""
    fitting = (
        tile
        for tile in TILES
        if tile.rows == rows and tile.columns <= EXPERT_COLUMNS and n % tile.columns == 0
    )
    return max(fitting, key=lambda tile: (tile.columns // tile.warps, tile.columns))


class Kernel(NamedTuple):
    """What is compiled: a tile, what of K is fetched at once, and in how many stages."""

    tile: Tile
    stage_k: int
    stages: int
    slices: int
    experts: bool

    @classmethod
    def of(cls, tile: Tile, k: int, *, slices: int = 1, experts: bool = False) -> "Kernel":
        """For sums of length K."""
        longest, stages = TILES[tile][2:]
        stages = EXPERT_STAGES[tile.rows] if experts else stages
        return cls(tile, math.gcd(longest, k // slices), stages, slices, experts)


def _launch(kernel: Kernel, tiles: int, n: int, arguments: list[Any]) -> None:
    compiled, shared_bytes = _compiled(kernel)
    tile = kernel.tile
    grid, block = (tiles, n // tile.columns, kernel.slices), (tile.threads, 1, 1)
    compiled(grid=grid, block=block, args=arguments, shared_mem=shared_bytes)


def prepare(n: int, k: int, rows: int, slices: int) -> None:
    """Compiles what products of up to so many rows need, before a graph is captured."""
    for tile in {fastest(count, n, slices) for count in range(1, rows + 1)}:
        _compiled(Kernel.of(tile, k, slices=slices))


def prepare_experts(n: int, k: int, rows: int) -> None:
    """As `prepare`; rows: an expert's mean."""
    for tile in {widest(count, n) for count in EXPERT_STAGES if count <= tile_rows(rows, 1)}:
        _compiled(Kernel.of(tile, k, experts=True))


@cache
def _compiled(kernel: Kernel) -> tuple[Any, int]:
    """For the current GPU; and the bytes of shared memory that a block takes."""
    tile, stage_k, stages, slices, experts = kernel
    names = {"ROWS": tile.rows, "COLUMNS": tile.columns, "WARPS": tile.warps}
    names |= {"STAGE_K": stage_k, "STAGES": stages, "SLICES": slices}
    options = [f"-D{name}={value}" for name, value in names.items()]
    compiled = compile_kernel([*options, f"-DEXPERTS={experts:d}"])
    of_step = 9 * max(64, tile.columns)  # bytes of codes and scales
    of_stage = stage_k // 16 * of_step + tile.rows * 2 * stage_k
    shared_bytes = stages * (-(-of_stage // 1024) * 1024 + 2 * BARRIER_BYTES)
    compiled.set_shared_memory_config(shared_bytes)
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
    has_failed = nvrtc.nvrtcCompileProgram(program, len(options), words)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.value.decode()
    if has_failed:
        raise RuntimeError(f"few_rows.cu: {said}")
    if "serialized" in said:
        warnings.warn(f"few_rows.cu is slow with this NVRTC: {said}", stacklevel=2)
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw
