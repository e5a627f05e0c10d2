"""All-gather of packed shards: FSDP2's extension hooks of a fake-quantized parameter.

FSDP2 shards the first dimension and blocks run along the last, so that each rank can quantize its
shard alone. What travels is 4 bits a weight and one byte for 16 of them: 0.5625 B instead of the
2 B of BF16. The gathered parameter is the rounded weight itself, so the gradient reaches the
shards unchanged (straight-through).

FSDP2 calls the hooks for every weight, several times a step, and a step of small layers waits for
the CPU: hence one buffer a shard, one kernel that reads those of all ranks, and nothing else.
"""

from collections.abc import Sequence
from inspect import Parameter, Signature
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from qat_core.nvfp4 import ShardLayout, pack_shards, shard_layout, unpack_shards
from qat_core.training.held_weights import HeldWeight
from qat_core.training.mesh import rows_of_a_shard, shard_rows
from qat_core.training.scales import Scales


class WeightShard(HeldWeight, Protocol):
    """A rank's shard of a fake-quantized weight."""

    scales: Scales


class PreAllGather:
    """`fsdp_pre_all_gather` of a shard: this rank's codes and block scales, and their layout.

    All shards of a mesh are packed together, once after each change of the weights, for all
    micro-batches and passes: packed alone, each would keep the CPU busier than the GPU, which waits
    for the first.

    FSDP2 checks the sizes of uneven shards only if the hook takes its five arguments; that check
    would demand inputs of the unpacked size. With the mesh alone any equal sizes may travel.

    FSDP2 asks at every gather how many arguments the hook takes. Python takes 9 us to answer of a
    method and 3 of an object with a signature (one core of an Intel Xeon).
    """

    __signature__ = Signature([Parameter("mesh", Parameter.POSITIONAL_OR_KEYWORD)])

    def __init__(self, shard: WeightShard) -> None:
        self._shard = shard

    def __call__(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], ShardLayout]:
        """Codes and block scales in one buffer, and its layout."""
        scales, name = self._shard.scales, self._shard.weight_name
        scales.refresh_if_stale(self._shard)
        packed = scales.packed_shards
        if not scales.weights.holds(self._shard):  # FSDP2 brought a copy from the CPU to the GPU
            packed = _pack([self._shard], scales, mesh)
        elif name not in packed:
            packed |= _pack(scales.weights.shared_by(mesh), scales, mesh)
        buffer, layout = packed[name]
        return (buffer,), layout


def _pack(
    shards: Sequence[HeldWeight], scales: Scales, mesh: DeviceMesh
) -> dict[str, tuple[Tensor, ShardLayout]]:
    scales.wait_until_ready()
    names = [shard.weight_name for shard in shards]
    shapes = [scales.shapes[name] for name in names]
    layouts = [shard_layout(shape, rows_of_a_shard(shape[0], mesh)) for shape in shapes]
    buffers = pack_shards(
        [shard.plain() for shard in shards],
        [_global_scale(shard, scales, mesh) for shard in shards],
        layouts,
        scales.method,
        names=names,
    )
    return dict(zip(names, zip(buffers, layouts, strict=True), strict=True))


def _global_scale(shard: HeldWeight, scales: Scales, mesh: DeviceMesh) -> Tensor:
    """Of a shard of experts, those of its experts."""
    global_scale = scales.values[shard.weight_name]
    if not global_scale.ndim:
        return global_scale
    first = shard_rows(len(global_scale), mesh).start
    return global_scale[first : first + len(shard.plain())]


def unpack_gathered(
    shard: WeightShard,
    gathered: tuple[Tensor],
    layout: ShardLayout,
    param_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor]] | None:
    """`fsdp_post_all_gather`: the whole rounded weight in `param_dtype`, in `out` if given."""
    scales, name = shard.scales, shard.weight_name
    if out is None:
        weight = torch.empty(scales.shapes[name], dtype=param_dtype, device=gathered[0].device)
    else:  # `data` counts no version: the values are those that autograd saved before
        weight = out.data
    unpack_shards(gathered[0], layout, scales.values[name], weight)
    return (weight, (weight,)) if out is None else None
