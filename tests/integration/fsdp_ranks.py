"""What every rank of the FSDP2 tests does; rank 0 writes down what it saw."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from qat_core.parameter import FakeQuantizedTensor
from qat_core.preparation import prepare, scales_of
from qat_core.recipe import Recipe
from tests.tiny_models import tiny_model, tokens

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FAMILIES = ("qwen3", "qwen2", "qwen3-moe")
DEFAULT = Recipe()
Build = Callable[[], nn.Module]


class Uneven(nn.Module):
    """Ten rows and two rows: over four ranks one shard is short, and two shards are empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(32, 10), nn.Linear(32, 2)]).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1)


def sharded(
    build: Build,
    recipe: Recipe = DEFAULT,
    reshard: bool = True,
    policy: MixedPrecisionPolicy = POLICY,
    **options: Any,
) -> nn.Module:
    """An FP32 model, prepared, its layers and itself sharded."""
    model = one_device(lambda: build().float(), recipe)
    layers = model.model.layers if hasattr(model, "model") else [model]
    for module in {id(m): m for m in (*layers, model)}.values():  # type: ignore[union-attr]
        fully_shard(module, mp_policy=policy, reshard_after_forward=reshard, **options)
    return model


def one_device(build: Build, recipe: Recipe = DEFAULT) -> nn.Module:
    model = build()
    prepare(model, recipe)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
    """Forward and backward of the same batch on every rank, then the optimizer; the output."""
    if isinstance(model, Uneven):
        out = model(torch.ones(4, 32).bfloat16())
        out.sum().backward()
    else:
        result = model(input_ids=tokens(), labels=tokens(), use_cache=False)
        result.loss.backward()
        out = result.logits
    if optimizer:
        optimizer.step()
        optimizer.zero_grad()
    return out.detach()


def compare(build: Build, recipe: Recipe = DEFAULT, **options: Any) -> dict[str, Any]:
    """One sharded step against one on a single device: output, gradients, gathered weights."""
    model, single = sharded(build, recipe, **options), one_device(build, recipe)
    out, expected = step(model), step(single)
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    differ = [n for n, p in single.named_parameters() if not torch.equal(grads[n], p.grad.float())]
    return {
        "same_output": torch.equal(out, expected),
        "grads_that_differ": differ,
        "weights_that_differ": gathered_differ(model, single),
    }


def gathered_differ(model: nn.Module, single: nn.Module) -> list[str]:
    """Quantized weights that an all-gather brings otherwise than one device rounds them."""
    rounded = {
        name: parameter.rounded()
        for name, parameter in single.named_parameters()
        if isinstance(parameter, FakeQuantizedTensor)
    }
    modules = [m for m in model.modules() if hasattr(m, "unshard")]
    for module in modules:
        module.unshard()
    gathered = dict(model.named_parameters())
    differ = [name for name, w in rounded.items() if not torch.equal(gathered[name], w)]
    for module in modules:
        module.reshard()
    return differ


def train(checkpoint: Path) -> dict[str, Any]:
    """Three optimizer steps, two micro-batches each; a distributed checkpoint of the result."""
    model = sharded(lambda: tiny_model("qwen3-moe"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model)
    scales = scales_of(model)
    assert scales is not None
    before = scales.num_refreshes
    for _ in range(3):
        step(model)
        step(model, optimizer)
    state = model.state_dict()
    kinds = {type(t._local_tensor) for t in state.values() if isinstance(t, DTensor)}
    dcp.save(state, checkpoint_id=checkpoint)
    return {
        "refreshes": scales.num_refreshes - before,
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


def written_in_one_group() -> list[bool]:
    """Whether steps equal those of one device, where FSDP2 gathers all weights before any hook.

    The weights are written through the state dict, as DTensors and as dcp does.
    """
    model = one_device(lambda: tiny_model("qwen3").float())
    single = one_device(lambda: tiny_model("qwen3"))
    fully_shard(model, mp_policy=POLICY)
    same = [torch.equal(step(model), step(single))]
    for local in (False, True):
        for entry in model.state_dict().values():
            (entry.to_local() if local else entry).mul_(2)
        for entry in single.state_dict().values():
            entry.mul_(2)
        same.append(torch.equal(step(model), step(single)))
    return same


def moved() -> dict[str, bool]:
    """Whether casts, as moves to another device do, leave no old shard, and steps go on.

    FSDP2 pads short shards again, on their ranks alone.
    """
    model = sharded(Uneven)
    out = step(model)
    weight: Any = model.layers[0].weight  # type: ignore[union-attr, index]
    old = weakref.ref(weight.to_local().plain())
    model.bfloat16()
    gc.collect()
    return {"freed": old() is None, "same_output": torch.equal(step(model.float()), out)}


def refuses_columns() -> list[str]:
    """Errors of experts that are not sharded by expert."""
    place = lambda weight: Shard(1) if weight.ndim == 3 else None  # noqa: E731
    return errors(sharded(lambda: tiny_model("qwen3-moe"), shard_placement_fn=place))


def assigned() -> dict[str, Any]:
    """Shards that take the place of those that were prepared, sharded and used: a step with them.

    As accelerate loads (`cpu_ram_efficient_loading`), also onto the meta device.
    """
    other = sharded(lambda: tiny_model("qwen3-moe", seed=1))
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    expected = step(other)
    model = sharded(lambda: tiny_model("qwen3-moe"))
    step(model)
    model.zero_grad()
    model.load_state_dict(state, assign=True)
    same = {"same_output": torch.equal(step(model), expected)}
    with torch.device("meta"):
        empty = tiny_model("qwen3-moe").float()
    prepare(empty, DEFAULT, allow_meta=True)
    for module in (*empty.model.layers, empty):
        fully_shard(module, mp_policy=POLICY)
    empty.load_state_dict(state, assign=True)
    empty.model.rotary_emb = tiny_model("qwen3-moe").model.rotary_emb  # no part of a state dict
    return same | {"from_meta": torch.equal(step(empty), expected)}


def two_meshes() -> dict[str, bool]:
    """Whether layers that are sharded over different ranks equal one device; and a split group."""
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("s",))
    hybrid = init_device_mesh("cpu", (max(world // 2, 1), min(world, 2)), mesh_dim_names=("r", "t"))

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
        modules = (*model.model.layers, model)  # type: ignore[union-attr, misc]
        for module, mesh in zip(modules, (*meshes, flat), strict=True):
            fully_shard(module, mesh=mesh, mp_policy=POLICY)
        same[name] = torch.equal(step(model), step(single))
        same[name] &= not gathered_differ(model, single)
    return same


def refuses_a_split_group() -> list[str]:
    """Errors of gate and up over different meshes."""
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("s",))
    hybrid = init_device_mesh("cpu", (max(world // 2, 1), min(world, 2)), mesh_dim_names=("r", "t"))
    model = one_device(lambda: tiny_model("qwen3").float())
    mlp: Any = model.model.layers[0].mlp  # type: ignore[union-attr, index]
    fully_shard(mlp.gate_proj, mesh=flat)
    fully_shard(mlp.up_proj, mesh=hybrid)
    fully_shard(model, mesh=flat)
    return errors(model)


def written_by_collectives() -> dict[str, bool]:
    """Whether steps follow shards that a collective wrote, through each way to show them."""
    same = {}
    ways: dict[str, Callable[[nn.Module], list[Tensor]]] = {
        "to_local": lambda m: [p.to_local().detach() for p in m.parameters()],  # type: ignore[operator]
        "state dict": lambda m: [t.to_local() for t in m.state_dict().values()],
    }
    for name, show in ways.items():
        model = sharded(lambda: tiny_model("qwen3"))
        step(model)
        model.zero_grad()
        for tensor in show(model):
            dist.all_reduce(tensor)
        got, scales = step(model), scales_of(model)
        assert scales is not None
        scales.refresh()
        same[name] = torch.equal(got, step(model))
    return same


def replicas() -> dict[str, bool]:
    """Whether whole models follow weights that a collective of two ranks or more brought."""
    same = {}
    ways: dict[str, Callable[[nn.Module], list[Tensor]]] = {
        "data": lambda m: [p.data for p in m.parameters()],
        "detach": lambda m: [p.detach() for p in m.parameters()],
        "state dict": lambda m: list(m.state_dict().values()),
    }
    for name, show in ways.items():
        model = one_device(lambda: tiny_model("qwen3", seed=dist.get_rank()))
        step(model)
        for tensor in show(model):
            dist.broadcast(tensor, dist.get_world_size() - 1)
        fresh = tiny_model("qwen3")
        fresh.load_state_dict(model.state_dict())
        prepare(fresh, DEFAULT)
        flags: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(flags, torch.equal(step(model), step(fresh)))
        same[name] = all(flags)
    return same


def refuses_infinity() -> list[str]:
    """Errors of a weight that is infinite on one rank alone."""
    model = sharded(lambda: tiny_model("qwen3"))
    weight: Any = model.model.layers[0].mlp.down_proj.weight  # type: ignore[union-attr, index]
    if dist.get_rank() == 0:
        with torch.no_grad():
            weight.to_local()[0, 0] = torch.inf
    else:
        with torch.no_grad():
            weight.to_local().mul_(1)
    return errors(model)


def errors(model: nn.Module) -> list[str]:
    """What a step raises on each rank."""
    message, messages = "accepted", [""] * dist.get_world_size()
    try:
        step(model)
    except ValueError as error:
        message = str(error)
    dist.all_gather_object(messages, message)
    return messages


def packed_bytes() -> dict[str, float]:
    """Bytes a weight that a rank sends for the quantized weights of one layer."""
    model = sharded(lambda: tiny_model("qwen3"))
    step(model)
    scales = scales_of(model)
    assert scales is not None
    sent = sum(piece.nbytes for pieces in scales.packed_shards.values() for piece in pieces)
    weights = sum(shape.numel() for shape in scales.shapes.values()) / dist.get_world_size()
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
            build: Build = lambda family=family: tiny_model(family)  # type: ignore[misc] # noqa: E731
            results[f"{family}, reshard {reshard}"] = compare(build, reshard=reshard)
    results["uneven"] = compare(Uneven)
    offload = CPUOffloadPolicy(pin_memory=False)
    results["offload"] = compare(lambda: tiny_model("qwen3-moe"), offload_policy=offload)
    fp32 = {"recipe": Recipe(scale_policy="amax"), "policy": MixedPrecisionPolicy()}
    results["fp32"] = compare(lambda: tiny_model("qwen3").float(), **fp32)
    hybrid = init_device_mesh("cpu", (max(world // 2, 1), min(world, 2)), mesh_dim_names=("r", "s"))
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
