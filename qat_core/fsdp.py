"""All-gather of packed shards: FSDP2's extension hooks of a fake-quantized parameter.

FSDP2 shards the first dimension and blocks run along the last, so that each rank can quantize its
shard alone. What travels is 4 bits a weight and one byte for 16 of them: 0.5625 B instead of the
2 B of BF16. The gathered parameter is the rounded weight itself, so the gradient reaches the
shards unchanged (straight-through).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh

from qat_core.held_weights import HeldWeight
from qat_core.mesh import shard_rows
from qat_core.nvfp4 import PackedTensor, dequantize, dequantize_into, quantize_all
from qat_core.options import BLOCK_SIZE
from qat_core.scales import Scales


class WeightShard(HeldWeight, Protocol):
    """A rank's shard of a fake-quantized weight."""

    scales: Scales


def gather_packed(shard: WeightShard, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], None]:
    """`fsdp_pre_all_gather`: this rank's codes and block scales, both uint8, padded to equal size.

    FSDP2 checks the sizes of uneven shards only if the hook takes its five arguments; that check
    would demand inputs of the unpacked size. With the mesh alone any equal sizes may travel.

    All shards of a mesh are packed together, once after each change of the weights, for all
    micro-batches and passes: packed alone, each would keep the CPU busier than the GPU, which waits
    for the first.
    """
    scales, name = shard.scales, shard.weight_name
    scales.refresh_if_stale(name)
    if not scales.weights.holds(shard):  # FSDP2 brought a copy from the CPU to the GPU
        return _pack([shard], scales, mesh)[name], None
    if name not in scales.packed_shards:
        scales.packed_shards |= _pack(scales.weights.shared_by(mesh), scales, mesh)
    return scales.packed_shards[name], None


def _pack(
    shards: Sequence[HeldWeight], scales: Scales, mesh: DeviceMesh
) -> dict[str, tuple[Tensor, ...]]:
    scales.wait_until_ready()
    names = [shard.weight_name for shard in shards]
    packed = quantize_all(
        [shard.plain() for shard in shards],
        [_global_scale(shard, scales, mesh) for shard in shards],
        scales.method,
        names=names,
    )
    return {
        name: _padded(shard, len(shard_rows(scales.shapes[name][0], mesh)), mesh)
        for name, shard in zip(names, packed, strict=True)
    }


def _global_scale(shard: HeldWeight, scales: Scales, mesh: DeviceMesh) -> Tensor:
    """Of a shard of experts, those of its experts."""
    global_scale = scales.values[shard.weight_name]
    if not global_scale.ndim:
        return global_scale
    first = shard_rows(len(global_scale), mesh).start
    return global_scale[first : first + len(shard.plain())]


def _padded(packed: PackedTensor, num_rows: int, mesh: DeviceMesh) -> tuple[Tensor, ...]:
    """Codes and block scales as every rank sends them."""
    missing = num_rows - len(packed.codes)
    codes = _pad_rows(packed.codes, missing)
    block_scale = _pad_rows(packed.block_scale.view(torch.uint8), missing)
    if mesh.size() == 1:  # FSDP2 then copies the first input and forgets the others
        return (torch.cat((codes.view(-1), block_scale.view(-1))),)
    return codes, block_scale


@torch.no_grad()
def unpack_gathered(
    shard: WeightShard,
    gathered: tuple[Tensor, ...],
    _metadata: None,
    param_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """`fsdp_post_all_gather`: the whole rounded weight in `param_dtype`, in `out` if given.

    An FP32 product of code and scales is rounded to BF16, as on one device.
    """
    shape = shard.scales.shapes[shard.weight_name]
    packed = PackedTensor(*_split(gathered, shape), shard.scales.values[shard.weight_name])
    if out is None:
        weight = dequantize(packed, param_dtype).bfloat16().to(param_dtype)
        return weight, (weight,)
    # The same values as those that autograd saved in the forward pass: no new version.
    with _unsafe_preserve_version_counter(out):
        dequantize_into(packed, out)
        if out.dtype == torch.float32:
            out.copy_(out.bfloat16())
    return None


def _split(gathered: tuple[Tensor, ...], shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Codes and block scales of the whole weight, without the padding of the last shards."""
    if len(gathered) == 1:
        gathered = torch.split(gathered[0], [shape.numel() // 2, shape.numel() // BLOCK_SIZE])
    codes = gathered[0].view(-1, *shape[1:-1], shape[-1] // 2)
    block_scale = gathered[1].view(-1, *shape[1:-1], shape[-1] // BLOCK_SIZE)
    return codes[: shape[0]], block_scale[: shape[0]].view(torch.float8_e4m3fn)


def _pad_rows(rows: Tensor, num_missing: int) -> Tensor:
    if not num_missing:
        return rows
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, num_missing))
