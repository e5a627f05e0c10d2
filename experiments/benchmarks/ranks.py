"""Processes that compute together, each on a GPU of its own, or all on the CPU."""

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

BACKEND = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}  # shards in the CPU's memory need gloo


def join_ranks(rank: int, world: int, folder: str, device: str) -> None:
    """Makes this process one of `world`; they meet in a file of `folder`."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    meeting = f"file://{folder}/rendezvous"
    dist.init_process_group(BACKEND[device], init_method=meeting, rank=rank, world_size=world)


def require_gpus_for(option: str, worlds: Sequence[int], device: str) -> None:
    """ValueError if this machine has fewer GPUs than the largest world has ranks."""
    found = torch.cuda.device_count()
    if device == "cuda" and found < max(worlds, default=1):
        raise ValueError(
            f"{option}: {max(worlds)} ranks: there are {found} CUDA GPUs; name others, or rehearse "
            "with --device cpu"
        )
