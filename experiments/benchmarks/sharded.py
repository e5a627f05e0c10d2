"""Benchmarks of decoder layers that FSDP2 shards over the GPUs of a host, one process a rank."""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.spawn import spawn

from experiments.benchmarks.records import Row
from experiments.runs.provenance import origin
from experiments.support.json_files import read_json, write_json

BACKEND = {"cuda": "nccl", "cpu": "gloo"}
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Measure = Callable[..., list[Row]]


def shard(model: nn.Module) -> None:
    """Make each decoder layer and the rest FSDP2 groups."""
    layers: Any = model.layers
    for layer in layers:
        fully_shard(layer, mp_policy=POLICY)
    fully_shard(model, mp_policy=POLICY)


def measure_on_ranks(
    measure: Measure,
    stacks: Sequence[Any],
    worlds: Sequence[int],
    device: str,
    record: Path,
    settings: dict[str, Any],
) -> None:
    """Record what the first rank finds of each stack, for each number of ranks.

    Args:
        measure: importable, as each rank is a process; called with what a stack is.
        stacks: one after the other.
        worlds: numbers of ranks.
        device: "cuda" or "cpu".
        record: written after each stack, to its `rows`.
        settings: what else the record says, beside machine, versions and commit.

    Raises:
        ValueError: there are fewer GPUs than ranks.
    """
    if device == "cuda" and torch.cuda.device_count() < max(worlds):
        raise ValueError(
            f"--worlds: {max(worlds)}: there are {torch.cuda.device_count()} CUDA GPUs; name "
            "fewer, or rehearse with --device cpu"
        )
    record.parent.mkdir(parents=True, exist_ok=True)
    write_json(record, {**settings, **origin(device), "rows": []})
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world, device, f"{folder}/rendezvous", measure, stacks, record)
            spawn(_rank, arguments, nprocs=world)  # type: ignore[no-untyped-call]


def _rank(
    rank: int,
    world: int,
    device: str,
    rendezvous: str,
    measure: Measure,
    stacks: Sequence[Any],
    record: Path,
) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        BACKEND[device], init_method=f"file://{rendezvous}", rank=rank, world_size=world
    )
    for stack in stacks:
        result = measure(*stack)
        if rank == 0:
            Console().print_json(data=result)
            content = read_json(record)
            write_json(record, content | {"rows": [*content["rows"], *result]})
    dist.destroy_process_group()
