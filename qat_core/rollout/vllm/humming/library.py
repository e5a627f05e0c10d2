"""Where humming-kernels 0.1.19 can multiply a weight, and a weight in its words.

Imports it when it is asked. Humming compiles a kernel for each layer shape and tile, a second or
two each, and keeps it in `HUMMING_CACHE_DIR`.
"""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from qat_core.options import BLOCK_SIZE

VERSION = "0.1.19"
NUM_LOCKS = 2048  # as Humming's own layer has; parts of split sums meet there


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


def require(asked: str, instead: str) -> None:
    """Sets up Humming for kernels that somebody has asked for.

    Args:
        asked: who, for errors.
        instead: what else to do than install what is missing.

    Raises:
        ValueError: another Humming than this was written for, or not a Hopper GPU.
    """
    try:
        found = version("humming-kernels")
    except PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise ValueError(
            f"{asked}: needs humming-kernels=={VERSION}, found {found}: `pip install --no-deps "
            f"humming-kernels=={VERSION}`, or {instead}"
        )
    if not is_hopper():
        raise ValueError(f"{asked}: Humming's layout is that of Hopper GPUs (sm_90); {instead}")
    from vllm import envs

    os.environ.setdefault("HUMMING_CACHE_DIR", os.path.join(envs.VLLM_CACHE_ROOT, "humming"))


def is_hopper() -> bool:
    """Whether the GPU has the instructions that the layout is made for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
