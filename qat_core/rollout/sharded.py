"""Stream of an FSDP2-sharded model: every rank packs its shards, only packed bytes are gathered.

Blocks run along the last dimension and FSDP2 shards the first, hence a rank needs of the others
only the largest |w| of a fused group. A group at a time is in memory, 0.5625 B a weight.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qat_core.nvfp4 import PackedTensor, global_scale, group_amax, quantize
from qat_core.plan import QuantPlan
from qat_core.recipe import Recipe


def sharded_weight_stream(
    model: nn.Module, plan: QuantPlan, recipe: Recipe, device: torch.device
) -> Iterator[tuple[str, Tensor | PackedTensor]]:
    """As `weight_stream`, for a model whose parameters are DTensors: whole weights, on every rank.

    A collective: all ranks have to go through it together.

    Args:
        model: prepared or not, BF16 or FP32, on any device (offloaded shards come to `device`).
        plan: what to pack.
        recipe: scale policies.
        device: where to pack; the stream's tensors lie there.
    """
    shards = dict(model.state_dict())
    group_of = {name: names for names in plan.groups.values() for name in names}
    for entry in plan.entries:
        if not entry.quantized:
            yield entry.name, _whole(shards[entry.name].to(device, torch.bfloat16))
        elif entry.name == group_of[entry.name][0]:  # the others of its group come along
            members = {name: shards[name].to(device) for name in group_of[entry.name]}
            yield from _pack_group(members, recipe)


def _pack_group(members: dict[str, DTensor], recipe: Recipe) -> Iterator[tuple[str, PackedTensor]]:
    scale = global_scale(_shared_amax(list(members.values())), recipe.scale)
    for name, member in members.items():
        packed = quantize(member.to_local(), scale, recipe.block_scale, name=name)
        scale_bytes = _gather(packed.block_scale.view(torch.uint8), member)
        yield (
            name,
            PackedTensor(
                _gather(packed.codes, member),
                scale_bytes.view(torch.float8_e4m3fn),
                scale if scale.ndim == 0 else _gather(scale, member),
            ),
        )


def _shared_amax(members: Sequence[DTensor]) -> Tensor:
    """Largest |w|: 0-D over all ranks; of experts (E_local,), whose shards are whole experts."""
    (amax,) = group_amax([[member.to_local() for member in members]])
    if amax.ndim == 0:
        for dim, placement in enumerate(members[0].placements):
            if placement.is_shard():
                dist.all_reduce(amax, dist.ReduceOp.MAX, members[0].device_mesh.get_group(dim))
    return amax


def _gather(local: Tensor, weight: DTensor) -> Tensor:
    """The whole of a tensor of which each rank has some rows, cut as the weight is."""
    shape = torch.Size((weight.shape[0], *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    sharded = DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride
    )
    return sharded.full_tensor()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
