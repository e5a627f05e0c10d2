"""Drift of a model's quantized weights: measured on a sample of blocks, once an optimizer step.

    monitor = DriftMonitor(model, recipe)
    rows = monitor.observe()      # after optimizer.step()
    metrics = summary(rows)       # drift/* for a logger

The same blocks are looked at every time, about a hundred a weight, so that codes can be compared
from step to step and the cost stays far below that of a step, whatever the model's size.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qat_core.drift import MEASURES
from qat_core.drift.blocks import chosen_blocks, flipped, measure
from qat_core.nvfp4 import quantize_all
from qat_core.options import BLOCK_SIZE
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.training.parameter import FakeQuantizedTensor
from qat_core.training.preparation import state_of
from qat_core.weights.packing import group_scales

BLOCKS_PER_WEIGHT = 128
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class WeightDrift:
    """One weight at one step, of its blocks that were looked at; see `drift.blocks`."""

    layer: int | None  # its number, None outside the layers
    kind: str  # the weight's name within its layer
    relative_error: float  # |w - w'| / |w|, Euclidean norms
    saturated_blocks: float  # share, as the next
    zeroed_blocks: float
    threshold_distance: float  # mean over weights
    flipped_codes: float | None  # share that differs from the last observation, None at the first
    scale_changes: float | None  # share of matrices whose global scale differs, likewise


class DriftMonitor:
    """Looks at some blocks of every weight that a recipe quantizes, sharded ones refused.

    A model that trains in BF16 is looked at as rollouts would round it.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, blocks_per_weight: int = BLOCKS_PER_WEIGHT
    ) -> None:
        self._model, self._recipe, self._plan = model, recipe, plan(model, recipe)
        generator = torch.Generator().manual_seed(0)
        self._chosen: dict[str, Tensor] = {}
        counts = []
        for name in self._plan.quantized:
            weight = model.get_parameter(name)
            if isinstance(weight, DTensor):
                raise ValueError(f"{name}: is sharded; drift is measured on one device")
            chosen = chosen_blocks(weight.shape, blocks_per_weight, generator)
            self._chosen[name] = chosen.to(weight.device)
            counts.append(len(chosen) * prod(weight.shape[:-2]))
        owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        self._owner_T = owners.to(weight.device)
        self._last: _Sample | None = None

    @torch.no_grad()
    def observe(self) -> list[WeightDrift]:
        """A row a weight, in the model's order. Waits for the device once."""
        weights = {name: trained_values(self._model.get_parameter(name)) for name in self._chosen}
        scales = self._global_scales(weights)
        sample = self._sample(weights, scales)
        columns = [measure(sample.w_T16, sample.codes_T8, sample.scale_T1, sample.global_T1)]
        if self._last is not None:
            columns += [
                flipped(self._last.codes_T8, sample.codes_T8),
                (self._last.global_T1 != sample.global_T1).float(),
            ]
        self._last = sample
        per_block = torch.cat(columns, -1)
        sums = per_block.new_zeros(len(weights), per_block.shape[-1])
        sums.index_add_(0, self._owner_T, per_block)
        counts = torch.bincount(self._owner_T, minlength=len(weights))
        rows = torch.cat([sums, counts[:, None]], -1).tolist()
        return [_drift(name, row) for name, row in zip(weights, rows, strict=True)]

    def _sample(self, weights: Mapping[str, Tensor], scales: Mapping[str, Tensor]) -> "_Sample":
        blocks = [
            weight.reshape(*weight.shape[:-2], -1, BLOCK_SIZE).index_select(-2, self._chosen[name])
            for name, weight in weights.items()
        ]
        global_scales = [scales[name] for name in weights]
        method = self._recipe.block_scale_method
        packed = quantize_all(blocks, global_scales, method, names=list(weights))
        return _Sample(
            torch.cat([w.reshape(-1, BLOCK_SIZE) for w in blocks]),
            torch.cat([it.codes.reshape(-1, BLOCK_SIZE // 2) for it in packed]),
            torch.cat([it.block_scale.view(torch.uint8).reshape(-1, 1) for it in packed]).view(
                torch.float8_e4m3fn
            ),
            torch.cat(
                [
                    it.global_scale[..., None, None].expand(it.block_scale.shape).reshape(-1, 1)
                    for it in packed
                ]
            ),
        )

    def _global_scales(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A prepared model has them; of another they take a pass over all weights."""
        prepared = state_of(self._model)
        has_all = prepared is not None and all(name in prepared.values for name in weights)
        if prepared is not None and has_all and prepared.policy == self._recipe.scale_policy:
            prepared.update()
            return {name: prepared.values[name] for name in weights}
        groups = [{n: weights[n] for n in names} for names in self._plan.groups.values()]
        found = group_scales(groups, self._recipe.scale_policy)
        return {n: s for names, s in zip(groups, found, strict=True) for n in names}


@dataclass(frozen=True)
class _Sample:
    """The chosen blocks of all weights, one after the other; arguments of `measure`."""

    w_T16: Tensor
    codes_T8: Tensor
    scale_T1: Tensor
    global_T1: Tensor


def summary(rows: Sequence[WeightDrift]) -> dict[str, float]:
    """Means over all weights as `drift/<measure>`, without those that are not known yet."""
    metrics = {}
    for name in MEASURES:
        known = [value for row in rows if (value := getattr(row, name)) is not None]
        if known:
            metrics[f"drift/{name}"] = sum(known) / len(known)
    return metrics


def trained_values(weight: Tensor) -> Tensor:
    """A parameter's values as they are trained, not rounded."""
    data = weight.data
    return data.plain() if isinstance(data, FakeQuantizedTensor) else data


def _drift(name: str, sums: list[float]) -> WeightDrift:
    """From the sums of `measure` over a weight's blocks, then of changes, then their number."""
    found = LAYER.search(name)
    kind = name[found.end() :] if found else name
    squared_error, squared_norm, *rest, count = sums
    saturated, zeroed, distance, *changes = (value / count for value in rest)
    return WeightDrift(
        layer=int(found[1]) if found else None,
        kind=kind.removesuffix(".weight"),
        relative_error=(squared_error / squared_norm) ** 0.5 if squared_norm else 0.0,
        saturated_blocks=saturated,
        zeroed_blocks=zeroed,
        threshold_distance=distance,
        flipped_codes=changes[0] if changes else None,
        scale_changes=changes[1] if changes else None,
    )
