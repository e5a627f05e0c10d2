"""Exact products of few rows with NVFP4 weights in Humming's layout, by `few_rows.cu`.

Humming's own batch-invariant tiles give a warp 32 columns at least, whose codes it unpacks between
two additions; here it is 16, so that four times as many warps share a layer's work at a row.
"""

import ctypes
from functools import lru_cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from qat_core.options import BLOCK_SIZE

COLUMNS = 64  # of a block of threads
THREADS = 128
TILE_ROWS = (8, 16, 32, 64)
STAGES = {8: 6, 16: 6, 32: 5, 64: 4}  # by the rows of a tile: as many as keep memory busy


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
    kernel, shared_bytes = _kernel(tile, k % 128 == 0, False, x.device)
    _launch(
        kernel,
        (n // COLUMNS, -(-rows // tile), 1),
        [x, words, scale, multiplier, out, x, x, x, rows, n, k, 1],
        shared_bytes,
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
    kernel, shared_bytes = _kernel(tile, k % 128 == 0, True, x.device)
    _launch(
        kernel,
        (n // COLUMNS, len(order[1]), 1),
        [x, words, scale, multiplier, out, *order, pairs, n, k, pairs // len(x)],
        shared_bytes,
    )


def _launch(kernel: Any, grid: tuple[int, int, int], arguments: list[Any], shared: int) -> None:
    kernel(grid=grid, block=(THREADS, 1, 1), args=arguments, shared_mem=shared)


def prepare(k: int, experts: bool, device: torch.device) -> None:
    """Compiles what products of a weight of K columns need, before a graph is captured."""
    for rows in TILE_ROWS:
        _kernel(rows, k % 128 == 0, experts, device)


@lru_cache
def _kernel(rows: int, is_long: bool, experts: bool, device: torch.device) -> tuple[Any, int]:
    """For a tile's rows and stages of 128 or 64 of K; and the bytes of shared memory it takes."""
    stage_k = 128 if is_long else 64
    names = {"TILES": rows // 8, "STAGE_K": stage_k, "STAGES": STAGES[rows], "EXPERTS": +experts}
    with torch.cuda.device(device):
        kernel = compile_kernel([f"-D{name}={value}" for name, value in names.items()])
        shared_bytes = STAGES[rows] * (stage_k // 16 * (512 + 64) + rows * 2 * stage_k)
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
