"""Shards of weights, packed as they travel and unpacked where all have arrived.

FSDP2 gathers the shards of a weight many times a step. One buffer a shard, and one kernel that
reads the buffers of all as they lie, keep the CPU from being what a step waits for.
"""

from collections.abc import Sequence

from torch import Tensor

from qat_core.nvfp4.checks import checked
from qat_core.nvfp4.custom_ops import backend
from qat_core.nvfp4.format import ShardLayout
from qat_core.options import BlockScaleMethod


def pack_shards(
    weights: Sequence[Tensor],
    global_scales: Sequence[Tensor],
    layouts: Sequence[ShardLayout],
    method: BlockScaleMethod = "max",
    *,
    names: Sequence[str],
) -> list[Tensor]:
    """Codes and block scales of each shard, uint8 (layout.num_bytes,).

    A shard is this rank's rows (..., N, K) of a weight. On a GPU in a launch for a size of matrix.
    Not for torch.compile. The results share memory, which lives as long as one of them does.
    """
    weights = checked(weights, global_scales, method, names)
    if not weights:
        return []
    buffers: list[Tensor] = backend(weights[0]).pack_shards(weights, global_scales, layouts, method)
    return buffers


def unpack_shards(shards: Tensor, layout: ShardLayout, global_scale: Tensor, out: Tensor) -> None:
    """Write the whole weight that the shards stand for, rounded to BF16, into `out`.

    Not for torch.compile.

    Args:
        shards: the buffers of all shards, one behind the other, uint8 1-D.
        layout: of each of them.
        global_scale: FP32, 0-D, or (E,) for experts (E, N, K), which are sharded by expert.
        out: contiguous (N, K) or (E, N, K), BF16 or FP32.
    """
    assert out.is_contiguous()
    backend(out).unpack_shards(shards, layout, global_scale, out)
