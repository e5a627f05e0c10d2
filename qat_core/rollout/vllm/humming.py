"""Which kernels of humming-kernels 0.1.19 multiply a weight; imports it when it is asked.

Humming compiles a kernel for each layer shape and tile, a second or two each, and keeps it in
`HUMMING_CACHE_DIR`.
"""

from collections.abc import Callable
from typing import Any

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


def tiles_for(
    config: Any, compute: dict[str, Any], is_needed: Callable[[int, int], bool]
) -> list[Any]:
    """Of Humming's table (rows above, rows up to, tile) the entries whose rows are needed.

    Args:
        config: Humming's `LayerConfig`.
        compute: arguments of its search, such as `gemm_type`.
        is_needed: of the rows above which and up to which an entry serves.
    """
    from humming.tune import get_heuristics_config

    table = get_heuristics_config(config, **compute)
    return [entry for entry in table if is_needed(entry[0], entry[1])]
