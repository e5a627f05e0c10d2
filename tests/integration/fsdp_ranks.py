"""What every rank of the FSDP2 tests does; rank 0 writes down what it saw."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from qat_core.exact import make_exact
from qat_core.exact.model import Ranks
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import state_of
from tests.integration.fsdp_steps import (
    FAMILIES,
    POLICY,
    Build,
    Uneven,
    assigned,
    compare,
    errors,
    gathered_differ,
    moved,
    one_device,
    replicas,
    sharded,
    step,
    written_by_collectives,
    written_in_one_group,
)
from tests.tiny_models import tiny_model


def exact_model(family: str, engine_ranks: int = 1) -> nn.Module:
    """It computes, checkpointing layers, what an exact engine would."""
    model = tiny_model(family, head_dim=64)
    make_exact(model, Ranks(engine_ranks))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def train(checkpoint: Path) -> dict[str, Any]:
    """Three optimizer steps, two micro-batches each; a distributed checkpoint of the result."""
    model = sharded(lambda: tiny_model("qwen3-moe"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model)
    state = state_of(model)
    before = state.num_refreshes
    for _ in range(3):
        step(model)
        step(model, optimizer)
    entries = model.state_dict()
    kinds = {type(t._local_tensor) for t in entries.values() if isinstance(t, DTensor)}
    dcp.save(entries, checkpoint_id=checkpoint)
    return {
        "refreshes": state.num_refreshes - before,
        "local_types": [kind.__name__ for kind in kinds],
        "optimizer_types": sorted(
            {type(v).__name__ for s in optimizer.state.values() for v in s.values()}
        ),
        "loss_after": step(model),
    }


def resumed(checkpoint: Path) -> Tensor:
    """Output of a differently initialised model that loads the checkpoint."""
    model = sharded(lambda: tiny_model("qwen3-moe", seed=1))
    step(model)  # scales of the old weights are known, and must be forgotten
    model.zero_grad()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=checkpoint)
    model.load_state_dict(state)
    return step(model)


def refuses_columns() -> list[str]:
    """Errors of experts that are not sharded by expert."""
    place = lambda weight: Shard(1) if weight.ndim == 3 else None  # noqa: E731
    return errors(sharded(lambda: tiny_model("qwen3-moe"), shard_placement_fn=place))


def _meshes(*names: str) -> tuple[DeviceMesh, DeviceMesh]:
    """One over all ranks, and one that shards over two of them."""
    world = dist.get_world_size()
    hybrid = init_device_mesh("cpu", (max(world // 2, 1), min(world, 2)), mesh_dim_names=names)
    return init_device_mesh("cpu", (world,), mesh_dim_names=("all",)), hybrid


def two_meshes() -> dict[str, bool]:
    """Whether layers that are sharded over different ranks equal one device."""
    flat, hybrid = _meshes("r", "t")

    def build() -> nn.Module:
        model = tiny_model("qwen3")
        with torch.no_grad():  # the largest weights lie with the last rank
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter[-parameter.shape[0] // 4 :] *= 8
        return model

    same = {}
    for name, meshes in {"flat first": (flat, hybrid), "hybrid first": (hybrid, flat)}.items():
        model, single = one_device(lambda: build().float()), one_device(build)
        modules = (*model.model.layers, model)
        for module, mesh in zip(modules, (*meshes, flat), strict=True):
            fully_shard(module, mesh=mesh, mp_policy=POLICY)
        same[name] = torch.equal(step(model), step(single))
        same[name] &= not gathered_differ(model, single)
    return same


def refuses_a_split_group() -> list[str]:
    """Errors of gate and up over different meshes."""
    flat, hybrid = _meshes("r", "t")
    model = one_device(lambda: tiny_model("qwen3").float())
    mlp: Any = model.model.layers[0].mlp
    for module, mesh in ((mlp.gate_proj, flat), (mlp.up_proj, hybrid), (model, flat)):
        fully_shard(module, mesh=mesh)
    return errors(model)


def refuses_infinity() -> list[str]:
    """Errors of a weight that is infinite on one rank alone."""
    model = sharded(lambda: tiny_model("qwen3"))
    weight: Any = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        if dist.get_rank() == 0:
            weight.to_local()[0, 0] = torch.inf
        else:
            weight.to_local().mul_(1)
    return errors(model)


def packed_bytes() -> dict[str, float]:
    """Bytes a weight that a rank sends for the quantized weights of one layer."""
    model = sharded(lambda: tiny_model("qwen3"))
    step(model)
    state = state_of(model)
    sent = sum(buffer.nbytes for buffer, _ in state.packed_shards.values())
    weights = sum(shape.numel() for shape in state.shapes.values()) / dist.get_world_size()
    return {"bytes_per_weight": sent / weights}


def run(rank: int, world: int, folder: str, saved_by: int) -> None:
    """All checks of one rank; the results of rank 0 go to `world<world>.pt`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world
    )
    results: dict[str, Any] = {}
    for family in FAMILIES:
        for reshard in (True, False):
            build: Build = lambda family=family: tiny_model(family)  # noqa: E731
            results[f"{family}, reshard {reshard}"] = compare(build, reshard=reshard)
    for family in ("qwen3", "qwen3-moe"):
        results[f"{family}, exact"] = compare(partial(exact_model, family))
    results["qwen3-moe, exact in halves"] = compare(partial(exact_model, "qwen3-moe", 2))
    results["uneven"] = compare(Uneven)
    offload = CPUOffloadPolicy(pin_memory=False)
    results["offload"] = compare(lambda: tiny_model("qwen3-moe"), offload_policy=offload)
    fp32 = {"recipe": Recipe(scale_policy="amax"), "policy": MixedPrecisionPolicy()}
    results["fp32"] = compare(lambda: tiny_model("qwen3").float(), **fp32)
    _, hybrid = _meshes("r", "s")
    results["hybrid"] = compare(lambda: tiny_model("qwen3-moe"), mesh=hybrid)
    results["trained"] = train(Path(folder, f"checkpoint{world}"))
    if saved_by:
        results["resumed"] = resumed(Path(folder, f"checkpoint{saved_by}"))
    results["written"] = written_in_one_group()
    results["moved"] = moved()
    results["infinity"] = refuses_infinity()
    results["columns"] = refuses_columns()
    results["assigned"] = assigned()
    results["two meshes"] = two_meshes()
    results["split group"] = refuses_a_split_group()
    results["collectives"] = written_by_collectives() | replicas()
    results["packed"] = packed_bytes()
    if rank == 0:
        torch.save(results, Path(folder, f"world{world}.pt"))
    dist.destroy_process_group()
