"""Global scales and packed bytes of weights, whole or sharded.

Of a sharded weight (DTensor) every rank packs its part and only packed bytes are gathered: of the
others it needs no more than the largest |w|.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qat_core.nvfp4 import (
    PackedTensor,
    global_scale,
    group_amax,
    is_representable,
    quantize,
    require_finite,
)
from qat_core.options import BLOCK_SIZE, BlockScaleMethod, ScalePolicy
from qat_core.training.mesh import held_rows, max_over_ranks


def group_scales(groups: Sequence[Mapping[str, Tensor]], policy: ScalePolicy) -> list[Tensor]:
    """Global scale of each group of weights by name, FP32 of their leading dimensions' shape.

    Waits for the device once. The ranks that share a weight go through it together, and raise the
    same ValueError for NaN or infinity in BF16.
    """
    if not groups:
        return []
    scales, finite = measured_scales(groups, policy)
    if not bool(finite):
        single = [{name: weight} for members in groups for name, weight in members.items()]
        require_finite(_amax(single), [name for members in single for name in members])
    return scales


def measured_scales(
    groups: Sequence[Mapping[str, Tensor]], policy: ScalePolicy
) -> tuple[list[Tensor], Tensor]:
    """As `group_scales` without a wait: also whether all weights are finite in BF16, a 0-D bool."""
    amax = _amax(groups)
    scales = _split_as(amax, global_scale(_flat(amax), policy))
    return scales, is_representable(_flat(amax)).all()


def require_finite_unpacked(weights: Mapping[str, Tensor]) -> None:
    """ValueError naming one that is not finite in BF16; waits once, and raises on all ranks."""
    floating = {name: it for name, it in weights.items() if it.is_floating_point()}
    if floating and not bool((finite := finite_unpacked([*floating.values()])).all()):
        name = next(it for it, fits in zip(floating, finite, strict=True) if not fits)
        raise ValueError(f"{name}: holds NaN or infinity once rounded to BF16")


def finite_unpacked(weights: Sequence[Tensor]) -> Tensor:
    """Whether each is finite in BF16, bool, 1-D, without a wait.

    Reads each rank's part once, at the bandwidth of its memory: little beside sending it.
    """
    local = [_local(weight) for weight in weights]
    norms = torch._foreach_norm([it if it.numel() else it.new_zeros(1) for it in local], torch.inf)
    amax = torch.stack([it.to(norms[0].device, torch.bfloat16) for it in norms])
    return _over_ranks(amax.float(), weights).isfinite()


def pack(name: str, weight: Tensor, scale: Tensor, method: BlockScaleMethod) -> PackedTensor:
    """The whole weight, packed; of a sharded one on every rank."""
    if not isinstance(weight, DTensor):
        return quantize(weight, scale, method, name=name)
    own_scale = scale[held_rows(name, weight)] if scale.ndim else scale
    packed = quantize(weight.to_local(), own_scale, method, name=name)
    scale_bytes = _gather(packed.block_scale.view(torch.uint8), weight, BLOCK_SIZE)
    codes = _gather(packed.codes, weight, 2)
    return PackedTensor(codes, scale_bytes.view(torch.float8_e4m3fn), scale)


def _amax(groups: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """Largest |w| of each group over all ranks, not finite where a weight is not."""
    weights = [weight for members in groups for weight in members.values()]
    local = [[_local(weight) for weight in members.values()] for members in groups]
    amax = [
        _of_all_rows(values, *next(iter(members.items())))
        for values, members in zip(group_amax(local), groups, strict=True)
    ]
    return _split_as(amax, _over_ranks(_flat(amax), weights))


def _over_ranks(amax: Tensor, weights: Sequence[Tensor]) -> Tensor:
    meshes = dict.fromkeys(w.device_mesh for w in weights if isinstance(w, DTensor))
    ranks = [group for mesh in meshes for group in mesh.get_all_groups()]
    return max_over_ranks(amax, *ranks) if ranks else amax


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _of_all_rows(values: Tensor, name: str, weight: Tensor) -> Tensor:
    """Of experts, which have a value each, also those of other ranks, which are 0 here."""
    if not values.ndim or not isinstance(weight, DTensor):
        return values
    whole = values.new_zeros(weight.shape[:-2])
    whole[held_rows(name, weight)] = values
    return whole


def _gather(local: Tensor, weight: DTensor, values_per_column: int) -> Tensor:
    """The whole of a tensor of which each rank has a part, cut as the weight is."""
    shape = torch.Size((*weight.shape[:-1], weight.shape[-1] // values_per_column))
    stride = torch.empty(shape, device="meta").stride()
    sharded = DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride
    )
    return sharded.full_tensor()


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _split_as(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
