"""What every rank of the sharded stream's tests does; rank 0 writes down what it saw."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from qat_core.nvfp4 import PackedTensor
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare
from qat_core.weights.stream import weight_stream
from qat_core.weights.transfer import PLAN_NAME, Assembler, transfer_tensors
from tests.tiny_models import tiny_model

RECIPES = {
    "pow2": Recipe(),
    "amax": Recipe(scale_policy="amax", block_scale_method="four_over_six"),
    "ffn": Recipe.ffn(),
}
# the last is finite in FP32 and rounds to infinity in BF16
BAD_VALUES = (float("nan"), float("inf"), 3.4e38)
BAD_WEIGHTS = {
    "qwen3": "model.layers.1.mlp.up_proj.weight",
    "qwen3-moe": "model.layers.1.mlp.experts.gate_up_proj",
}


def run(rank: int, world: int, folder: str) -> None:
    """Streams sharded models and compares them with the same models on one device."""
    store = f"file://{folder}/store{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    found = {
        (family, name, trained): _differing(family, recipe, trained)
        for family in ("qwen3", "qwen3-tied", "qwen3-moe")
        for name, recipe in RECIPES.items()
        for trained in (True, False)
    }
    if rank == 0:
        torch.save(found, Path(folder) / f"world{world}.pt")
    refusals = [_refusal(family, bad) for family in BAD_WEIGHTS for bad in BAD_VALUES]
    torch.save(refusals, Path(folder) / f"refusals{rank}.pt")
    dist.destroy_process_group()


def _differing(family: str, recipe: Recipe, trained: bool) -> list[str]:
    """Names of weights that differ, after the transfer, in buckets of three tensors."""
    model = tiny_model(family).float()
    checked = prepare(model, recipe) if trained else plan(model, recipe)
    whole = tiny_model(family)
    expected = dict(weight_stream(whole, plan(whole, recipe), recipe))
    _shard(model)
    stream = weight_stream(model, checked, recipe, torch.device("cpu"))
    tensors = list(transfer_tensors(checked, stream))
    assert tensors.pop(0)[0] == PLAN_NAME
    assembler = Assembler()
    buckets = [tensors[start : start + 3] for start in range(0, len(tensors), 3)]
    received = [weight for bucket in buckets for weight in assembler.take(bucket)]
    assembler.require_complete()
    assert sorted(name for name, _ in received) == sorted(expected)
    return [name for name, weight in received if not _equal(weight, expected[name])]


def _refusal(family: str, bad: float) -> str:
    """The error of a weight of which one value on the second rank is not finite."""
    model = tiny_model(family).float()
    _shard(model)
    weight: Any = model.get_parameter(BAD_WEIGHTS[family])
    if dist.get_rank() == 1:
        weight.to_local().detach().view(-1)[5] = bad
    checked = plan(model, Recipe())
    try:
        next(weight_stream(model, checked, Recipe(), torch.device("cpu")))
    except ValueError as error:
        return str(error)
    return "accepted"


def _shard(model: nn.Module) -> None:
    layers: Any = model.model.layers
    for module in (*layers, model):
        fully_shard(module)


def _equal(first: torch.Tensor | PackedTensor, second: torch.Tensor | PackedTensor) -> bool:
    if isinstance(first, PackedTensor) and isinstance(second, PackedTensor):
        return all(
            torch.equal(getattr(first, part).float(), getattr(second, part).float())
            for part in ("codes", "block_scale", "global_scale")
        )
    return type(first) is type(second) and torch.equal(first, second)
