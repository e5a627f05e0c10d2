"""Weights that verl saves and restores while offloading them has not ended."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from verl.utils import fsdp_utils

import qat_core.verl.saved_weights  # noqa: F401  it changes verl's functions

HALF_A_SECOND = 10**9  # cycles of an H100 or H200, about


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Module]:
    """A layer that one rank shards."""
    torch.cuda.set_device(0)
    rendezvous = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("cuda:nccl,cpu:gloo", init_method=rendezvous, rank=0, world_size=1)
    yield fully_shard(nn.Linear(2048, 2048, device="cuda"))
    dist.destroy_process_group()


def offload_late(model: nn.Module, value: float) -> None:
    """As verl does; copies of weights of this value begin when the host has long gone on."""
    model.to("cuda", non_blocking=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    torch.cuda.synchronize()
    torch.cuda._sleep(HALF_A_SECOND)
    model.to("cpu", non_blocking=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_shards_on_their_way_to_the_host_are_saved_and_restored_whole(model: nn.Module) -> None:
    for value in (1.0, 2.0):  # pinned memory is there from the second time on
        offload_late(model, value)
    shards, spec = fsdp_utils.fsdp2_sharded_save_to_cpu(model)
    assert all((shard == 2.0).all() for shard, _ in shards.values())
    offload_late(model, 3.0)
    fsdp_utils.fsdp2_sharded_load_from_cpu(model, shards, spec)
    torch.cuda.synchronize()
    assert all((it.to_local() == 2.0).all() for it in model.parameters())  # type: ignore[attr-defined]
