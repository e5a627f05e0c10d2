"""The weights of a checkpoint that an engine serves, under transformers' names."""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from qat_core.checkpoint.read import read_checkpoint
from qat_core.checkpoint.shards import read_json
from qat_core.nvfp4 import PackedTensor
from qat_core.plan import plan
from qat_core.recipe import Recipe
from qat_core.weights.hub_names import Weight
from qat_core.weights.stream import weight_stream

FUSED = (".experts.gate_up_proj", ".experts.down_proj")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def served_stream(folder: Path, recipe: Recipe | None) -> Iterator[tuple[str, Weight]]:
    """What an engine that loads `folder` holds: packed as stored, or packed now by `recipe`.

    Raises:
        ValueError: naming the file or weight that is wrong.
    """
    if "quantization_config" in read_json(folder / "config.json"):
        return _fused(read_checkpoint(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return weight_stream(model, plan(model, recipe) if recipe else None, recipe)


def _fused(weights: Iterator[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """The hub's matrices of experts put together as transformers 5 holds them."""
    for name, group in groupby(weights, key=lambda item: _fused_name(item[0])):
        members = [weight for _, weight in group]
        if name.endswith(".gate_up_proj"):
            members = [_joined(members[i : i + 2]) for i in range(0, len(members), 2)]
        yield name, _stacked(members) if name.endswith(FUSED) else members[0]


def _fused_name(name: str) -> str:
    found = EXPERT.fullmatch(name)
    if not found:
        return name
    return found[1] + (".down_proj" if found[3] == "down" else ".gate_up_proj")


def _joined(pair: list[Weight]) -> Weight:
    """Gate and up as one matrix; they share a global scale."""
    gate, up = pair
    if isinstance(gate, PackedTensor) and isinstance(up, PackedTensor):
        return PackedTensor(
            torch.cat([gate.codes, up.codes]),
            torch.cat([gate.block_scale, up.block_scale]),
            gate.global_scale,
        )
    assert isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor)
    return torch.cat([gate, up])


def _stacked(experts: list[Weight]) -> Weight:
    packed = [weight for weight in experts if isinstance(weight, PackedTensor)]
    if packed:
        return PackedTensor(
            torch.stack([weight.codes for weight in packed]),
            torch.stack([weight.block_scale for weight in packed]),
            torch.stack([weight.global_scale for weight in packed]),
        )
    return torch.stack([weight for weight in experts if isinstance(weight, torch.Tensor)])
