"""Which kernels of humming-kernels 0.1.19 multiply a weight, and where they can.

Imports it when it is asked. Humming compiles a kernel for each layer shape and tile, a second or
two each, and keeps it in `HUMMING_CACHE_DIR`.
"""

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any

import torch

from qat_core.options import BLOCK_SIZE
from qat_core.rollout.vllm.kernel_choice import require_vllm

VERSION = "0.1.19"
ANY_MORE = 1 << 30  # Humming's word for a tile that serves any number of rows
NUM_LOCKS = 2048  # as Humming's own layer has; parts of split sums meet there
# In experiments/records/benchmarks/matmul_h100.json this way takes at most 8 % more time than the
# better of both, at every number of rows, for the dense layers of Qwen3-8B and 30B-A3B (tested).
UNPACK_FROM = 2048
# Of Humming's table, with some 30 kernels a layer shape, these rows' tiles serve all up to them.
TILED_ROWS = (8, 32, 64, 128, 256, 512, 1024, UNPACK_FROM)
# Of `unsplit_tile`: so many blocks keep a GPU of 132 multiprocessors busy, and the second number
# does so several times over.
BUSY_FROM, BUSY_OFTEN_FROM = 96, 264


def weight_schema() -> Any:
    """NVFP4 with an FP32 scale for each matrix, in Humming's words."""
    from humming import dtypes
    from humming.schema import HummingWeightSchema

    return HummingWeightSchema(
        b_dtype=dtypes.float4e2m1,
        bs_dtype=dtypes.float8e4m3,
        weight_scale_group_size=BLOCK_SIZE,
        weight_scale_2_type="tensor",
    )


def tiles_for(config: Any, compute: dict[str, Any], rows: Sequence[int]) -> list[Any]:
    """Of Humming's table (rows above, rows up to, tile) the entries that `rows` need."""
    from humming.tune import get_heuristics_config

    return for_rows(get_heuristics_config(config, **compute), rows)


def for_rows(table: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    """The entries (rows above, rows up to, tile) of a table that some numbers of rows need."""
    return [entry for entry in table if any(entry[0] < m <= entry[1] for m in rows)]


def served_tiles(config: Any, n: int, k: int) -> list[Any]:
    """(rows above, rows up to, tile) of a linear layer (N, K) that vLLM serves."""
    own = tiles_for(config, {"gemm_type": "dense"}, TILED_ROWS)
    return [
        [above, up_to, unsplit_tile(n, k, up_to) or for_rows(own, [up_to])[0][2]]
        for above, up_to in pairwise((0, *TILED_ROWS))
    ]


def unsplit_tile(n: int, k: int, rows: int) -> dict[str, Any] | None:
    """A tile that splits no sum, where one takes at most 3 % more time than Humming's own choice.

    Each block of threads has 64 columns and all of K, so that bits repeat and sums are in FP32.
    Enough columns must be there to keep the GPU busy; up to 8 rows, where starting a kernel takes
    much of the time, also a short sum will do. Found by `experiments.benchmarks.humming_tiles` on
    an H200 at 1 and 32 rows (record humming_tiles_h200); rows between were not timed.
    """
    blocks = n // 64
    is_busy = blocks >= BUSY_FROM
    if rows > 32 or n % 64 or k % 256 or not (is_busy or (rows <= 8 and k <= 4096)):
        return None
    if blocks < BUSY_OFTEN_FROM:
        block_k, warp, stages, blocks_at_once = 256, (32, 64), 5, 1 if is_busy else 2
    elif rows <= 8:
        block_k, warp, stages, blocks_at_once = 128, (32, 64), 5, 3
    else:
        block_k, warp, stages, blocks_at_once = 128, (64, 32), 4, 3
    return {
        "mma_type": "mma",
        "block_shape": (rows, 64, block_k),
        "warp_shape": (rows, *warp),
        "num_stages": stages,
        "num_ctas_per_sm": blocks_at_once,
        "use_stream_k": False,
        "use_tma": False,
        "use_warp_spec": False,
    }


def require(variable: str, vllm_version: str) -> None:
    """Sets up vLLM and Humming for kernels that `variable` of the environment asks for.

    Raises:
        ValueError: another vLLM or Humming than this was written for, or not a Hopper GPU.
    """
    asked = f"{variable}=humming"
    require_vllm(asked, vllm_version)
    try:
        found = version("humming-kernels")
    except PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise ValueError(
            f"{asked}: needs humming-kernels=={VERSION}, found {found}: install it, or unset the "
            "variable to use Marlin"
        )
    if not is_hopper():
        raise ValueError(
            f"{asked}: Humming's layout is that of Hopper GPUs (sm_90); unset it to use Marlin"
        )
    from vllm import envs

    os.environ.setdefault("HUMMING_CACHE_DIR", os.path.join(envs.VLLM_CACHE_ROOT, "humming"))


def is_hopper() -> bool:
    """Whether the GPU has the instructions that the layout is made for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
