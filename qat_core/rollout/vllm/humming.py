"""Which kernels of humming-kernels 0.1.19 multiply a weight; imports it when it is asked.

Humming compiles a kernel for each layer shape and tile, a second or two each, and keeps it in
`HUMMING_CACHE_DIR`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from qat_core.options import BLOCK_SIZE

VERSION = "0.1.19"
NUM_LOCKS = 2048  # as Humming's own layer has; stream-K tiles meet there


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

    table = get_heuristics_config(config, **compute)
    return [entry for entry in table if any(entry[0] < m <= entry[1] for m in rows)]


@lru_cache
def expert_locks(device: torch.device) -> Tensor:
    """Where stream-K tiles of experts meet, int32 (NUM_LOCKS,): one for all layers, zero between.

    Layers follow each other in one stream, and CUDA graphs keep its address.
    """
    return torch.zeros(NUM_LOCKS, dtype=torch.int32, device=device)
