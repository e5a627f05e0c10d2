"""The weights of a checkpoint that an engine serves, under transformers' names."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat_core.checkpoint.architecture import meta_model
from qat_core.checkpoint.load import load_model
from qat_core.checkpoint.read import read_checkpoint
from qat_core.checkpoint.shards import read_json
from qat_core.nvfp4 import PackedTensor
from qat_core.planning.plan import Entry, bf16_plan, plan
from qat_core.planning.recipe import Recipe
from qat_core.weights.hub_names import HubNames, Weight
from qat_core.weights.stream import weight_stream


def served_stream(folder: Path, recipe: Recipe | None) -> Iterator[tuple[str, Weight]]:
    """What an engine that loads `folder` holds: packed as stored, or packed now by `recipe`."""
    if "quantization_config" in read_json(folder / "config.json"):
        return _fused(folder)
    model = load_model(folder)
    return weight_stream(model, plan(model, recipe) if recipe else None, recipe)


def _fused(folder: Path) -> Iterator[tuple[str, Weight]]:
    """A packed checkpoint's weights as syncs have them: experts fused, in transformers' dtypes."""
    model, stored = meta_model(folder), dict(read_checkpoint(folder))
    entries, names = {entry.name: entry for entry in bf16_plan(model).entries}, HubNames(model)
    for name, pieces in names.pieces.items():
        if pieces[0].name in stored:  # else the second name of a tied weight
            yield name, _joined(entries[name], names, stored)


def _joined(entry: Entry, names: HubNames, stored: Mapping[str, Any]) -> Weight:
    pieces = names.pieces[entry.name]
    first = stored[pieces[0].name]
    if not isinstance(first, PackedTensor):
        whole = names.join(entry.name, entry.shape, stored.__getitem__)
        return whole.to(getattr(torch, entry.dtype))
    if pieces[0].expert is None:
        return first

    def join(part: str) -> Tensor:
        shape = (*entry.shape[:-1], getattr(first, part).shape[-1])
        return names.join(entry.name, shape, lambda name: getattr(stored[name], part))

    # gate and up of an expert share one
    scales = {piece.expert: stored[piece.name].global_scale for piece in pieces}
    global_scale = torch.stack([scales[expert] for expert in range(len(scales))])
    return PackedTensor(join("codes"), join("block_scale"), global_scale)
