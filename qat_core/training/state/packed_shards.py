"""This rank's shards of sharded weights, packed to be gathered by the others."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from qat_core.nvfp4 import ShardLayout, pack_shards, shard_layout
from qat_core.options import BlockScaleMethod
from qat_core.training.mesh import rows_of_a_shard, shard_rows
from qat_core.training.state.held_weights import HeldWeight

PackedShard = tuple[Tensor, ShardLayout]


def pack_together(
    shards: Sequence[HeldWeight],
    shapes: Mapping[str, torch.Size],
    global_scales: Mapping[str, Tensor],
    method: BlockScaleMethod,
    mesh: DeviceMesh,
) -> dict[str, PackedShard]:
    """Codes and block scales of this rank's shards, a buffer and its layout by weight.

    Shapes and global scales are of the whole weights.
    """
    names = [shard.weight_name for shard in shards]
    layouts = [shard_layout(shapes[name], rows_of_a_shard(shapes[name][0], mesh)) for name in names]
    buffers = pack_shards(
        [shard.plain() for shard in shards],
        [_of_held_rows(shard, global_scales[shard.weight_name], mesh) for shard in shards],
        layouts,
        method,
        names=names,
    )
    return dict(zip(names, zip(buffers, layouts, strict=True), strict=True))


def _of_held_rows(shard: HeldWeight, global_scale: Tensor, mesh: DeviceMesh) -> Tensor:
    """Of a shard of experts, the scales of its experts."""
    if not global_scale.ndim:
        return global_scale
    first = shard_rows(len(global_scale), mesh).start
    return global_scale[first : first + len(shard.plain())]
