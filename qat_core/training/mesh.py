"""Ranks that share a weight: its mesh, the rows that a rank holds, maxima over the ranks.

FSDP2 cuts the first dimension of a weight as `torch.chunk` does: all shards have the same number of
rows but the last ones, which are short or empty.
"""

from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


def shard_mesh(name: str, weight: DTensor) -> DeviceMesh:
    """The dimension of the mesh along which FSDP2 shards: the last one also under HSDP.

    Raises:
        ValueError: naming a weight that is cut in another way than by rows.
    """
    *others, last = weight.placements
    if last != Shard(0) or any(other != Replicate() for other in others):
        raise ValueError(
            f"{name}: has the placements {weight.placements}; a quantized weight needs Shard(0) "
            "alone, or after Replicate(): call fully_shard without tensor parallelism"
        )
    mesh: DeviceMesh = weight.device_mesh
    names = mesh.mesh_dim_names
    return mesh if mesh.ndim == 1 or names is None else mesh[names[-1]]


def rows_of_a_shard(num_rows: int, mesh: DeviceMesh) -> int:
    """How many of `num_rows` each rank's shard has, rows of padding included."""
    return ceil(num_rows / mesh.size())


def shard_rows(num_rows: int, mesh: DeviceMesh) -> range:
    """Rows of this rank's shard among `num_rows`, rows of padding included."""
    size = rows_of_a_shard(num_rows, mesh)
    first = mesh.get_local_rank() * size
    return range(first, first + size)


def held_rows(name: str, weight: DTensor) -> slice:
    """Which part of the first dimension this rank holds; errors as `shard_mesh`."""
    if all(placement == Replicate() for placement in weight.placements):
        return slice(None)
    first = shard_rows(weight.shape[0], shard_mesh(name, weight)).start
    return slice(first, first + len(weight._local_tensor))


def max_over_ranks(amax: Tensor, *groups: dist.ProcessGroup) -> Tensor:
    """The largest over the ranks of each group; infinity where a rank's is not finite."""
    # A maximum with NaN is not defined in collectives, one with infinity is.
    amax = amax.masked_fill(~amax.isfinite(), torch.inf)
    for group in groups:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    return amax
