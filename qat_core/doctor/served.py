"""The weights of a checkpoint that an engine serves, under transformers' names."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch

from qat_core.checkpoint.architecture import meta_model
from qat_core.checkpoint.load import load_model
from qat_core.checkpoint.read import read_checkpoint
from qat_core.checkpoint.shards import read_json
from qat_core.nvfp4 import PackedTensor
from qat_core.planning.plan import bf16_plan, plan
from qat_core.planning.recipe import Recipe
from qat_core.weights.hub_names import HubNames, Piece, Weight
from qat_core.weights.stream import weight_stream


def served_stream(folder: Path, recipe: Recipe | None) -> Iterator[tuple[str, Weight]]:
    """What an engine that loads `folder` holds: packed as stored, or packed now by `recipe`.

    Raises:
        ValueError: naming the file or weight that is wrong.
    """
    if "quantization_config" in read_json(folder / "config.json"):
        return _fused(folder)
    model = load_model(folder)
    return weight_stream(model, plan(model, recipe) if recipe else None, recipe)


def _fused(folder: Path) -> Iterator[tuple[str, Weight]]:
    """A packed checkpoint's weights as syncs have them: experts fused, in transformers' dtypes."""
    model, stored = meta_model(folder), dict(read_checkpoint(folder))
    dtypes = {entry.name: getattr(torch, entry.dtype) for entry in bf16_plan(model).entries}
    for name, pieces in HubNames(model).pieces.items():
        if pieces[0].name in stored:  # else the second name of a tied weight
            weight = _joined(pieces, stored)
            yield name, weight if isinstance(weight, PackedTensor) else weight.to(dtypes[name])


def _joined(pieces: tuple[Piece, ...], stored: dict[str, Weight]) -> Weight:
    if pieces[0].expert is None:
        return stored[pieces[0].name]
    in_order = sorted(pieces, key=lambda piece: (piece.expert, piece.part))
    experts = groupby(in_order, key=lambda piece: piece.expert)
    return _stacked([_matrix([stored[p.name] for p in parts]) for _, parts in experts])


def _matrix(parts: list[Weight]) -> Weight:
    """One expert's matrix from its rows' parts; gate and up share a global scale."""
    packed = [part for part in parts if isinstance(part, PackedTensor)]
    if packed:
        return PackedTensor(
            torch.cat([part.codes for part in packed]),
            torch.cat([part.block_scale for part in packed]),
            packed[0].global_scale,
        )
    return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])


def _stacked(experts: list[Weight]) -> Weight:
    packed = [weight for weight in experts if isinstance(weight, PackedTensor)]
    if packed:
        return PackedTensor(
            torch.stack([weight.codes for weight in packed]),
            torch.stack([weight.block_scale for weight in packed]),
            torch.stack([weight.global_scale for weight in packed]),
        )
    return torch.stack([weight for weight in experts if isinstance(weight, torch.Tensor)])
