"""All-gather of packed shards: FSDP2's extension hooks of a fake-quantized parameter.

FSDP2 shards the first dimension and blocks run along the last, so that each rank can quantize its
shard alone. What travels is 4 bits a weight and one byte for 16 of them. The gathered parameter is
the rounded weight itself, so the gradient reaches the shards unchanged (straight-through).

A step of small layers waits for the CPU, which calls the hooks several times a weight: hence one
buffer a shard, one kernel that reads those of all ranks, and nothing else.
"""

from inspect import Parameter, Signature
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from qat_core.nvfp4 import ShardLayout, unpack_shards
from qat_core.training.state.held_weights import HeldWeight
from qat_core.training.state.weight_state import WeightState


class WeightShard(HeldWeight, Protocol):
    """A rank's shard of a fake-quantized weight."""

    state: WeightState


class PreAllGather:
    """`fsdp_pre_all_gather` of a shard: this rank's codes and block scales, and their layout.

    FSDP2 checks the sizes of uneven shards only if the hook takes its five arguments; that check
    would demand inputs of the unpacked size. It asks at every gather how many there are, which
    takes Python longer to answer of a method than of an object with a signature.
    """

    __signature__ = Signature([Parameter("mesh", Parameter.POSITIONAL_OR_KEYWORD)])

    def __init__(self, shard: WeightShard) -> None:
        self._shard = shard

    def __call__(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], ShardLayout]:
        """Codes and block scales in one buffer, and its layout."""
        buffer, layout = self._shard.state.packed_shard(self._shard, mesh)
        return (buffer,), layout


def unpack_gathered(
    shard: WeightShard,
    gathered: tuple[Tensor],
    layout: ShardLayout,
    param_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor]] | None:
    """`fsdp_post_all_gather`: the whole rounded weight in `param_dtype`, in `out` if given."""
    state, name = shard.state, shard.weight_name
    if out is None:
        weight = torch.empty(state.shapes[name], dtype=param_dtype, device=gathered[0].device)
    else:  # `data` counts no version: the values are those that autograd saved before
        weight = out.data
    unpack_shards(gathered[0], layout, state.values[name], weight)
    return (weight, (weight,)) if out is None else None
