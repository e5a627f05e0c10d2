"""Drift of a model's quantized weights: measured on a sample of blocks, once an optimizer step.

    monitor = DriftMonitor(model, recipe)
    rows = monitor.observe()      # after optimizer.step()
    metrics = summary(rows)       # drift/* for a logger

The same blocks are looked at every time, a few hundred a weight, so that codes can be compared from
step to step and the cost stays far below that of a step, whatever the model's size.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qat_core.drift.blocks import NAMES, chosen_blocks, flipped, measure
from qat_core.nvfp4 import PackedTensor, quantize_all
from qat_core.options import BLOCK_SIZE
from qat_core.parameter import FakeQuantizedTensor
from qat_core.plan import plan
from qat_core.preparation import scales_of
from qat_core.recipe import Recipe
from qat_core.weights.packing import group_scales

BLOCKS_PER_WEIGHT = 256
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class WeightDrift:
    """One weight at one step; measures are defined in `drift.blocks`.

    Attributes:
        layer: its number, None outside the layers.
        kind: the weight's name within its layer.
        flipped_codes: share of codes that differ from the last observation, None at the first.
        scale_changes: share of matrices (experts) whose global scale differs from it, likewise.
    """

    layer: int | None
    kind: str
    relative_error: float
    saturated_blocks: float
    zeroed_blocks: float
    threshold_distance: float
    flipped_codes: float | None
    scale_changes: float | None


class DriftMonitor:
    """Looks at some blocks of every weight that a recipe quantizes.

    Args:
        model: prepared or not, on one device; a model that trains in BF16 is looked at as rollouts
            would round it.
        recipe: what rollouts hold in NVFP4, and how.
        blocks_per_weight: how many blocks of a weight to look at.
        seed: of the choice of blocks.

    Raises:
        ValueError: as `plan`; or a weight is sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        blocks_per_weight: int = BLOCKS_PER_WEIGHT,
        seed: int = 0,
    ) -> None:
        self._model, self._recipe, self._plan = model, recipe, plan(model, recipe)
        generator = torch.Generator().manual_seed(seed)
        self._chosen: dict[str, Tensor] = {}
        for name in self._plan.quantized:
            weight = model.get_parameter(name)
            if isinstance(weight, DTensor):
                raise ValueError(f"{name}: is sharded; drift is measured on one device")
            chosen = chosen_blocks(weight.shape, blocks_per_weight, generator)
            self._chosen[name] = chosen.to(weight.device)
        self._codes: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}

    @torch.no_grad()
    def observe(self) -> list[WeightDrift]:
        """A row a weight, in the model's order. Waits for the device once."""
        weights = {name: _plain(self._model.get_parameter(name)) for name in self._chosen}
        scales = self._global_scales(weights)
        blocks = {name: self._blocks(name, weight) for name, weight in weights.items()}
        names = list(blocks)
        packed = quantize_all(
            list(blocks.values()),
            [scales[name] for name in names],
            self._recipe.block_scale_method,
            names=names,
        )
        values = torch.stack(
            [self._row(n, blocks[n], p) for n, p in zip(names, packed, strict=True)]
        ).tolist()
        is_first = not self._codes
        self._codes = {name: p.codes for name, p in zip(names, packed, strict=True)}
        self._scales = {name: scales[name].clone() for name in names}
        return [_drift(name, row, is_first) for name, row in zip(names, values, strict=True)]

    def _blocks(self, name: str, weight: Tensor) -> Tensor:
        """The chosen blocks, (n, 16) or (E, n, 16)."""
        return weight.reshape(*weight.shape[:-2], -1, BLOCK_SIZE).index_select(
            -2, self._chosen[name]
        )

    def _global_scales(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A prepared model has them; of another they take a pass over all weights."""
        prepared = scales_of(self._model)
        if prepared is not None and prepared.policy == self._recipe.scale_policy:
            prepared.refresh_if_stale()
            if all(name in prepared.values for name in weights):
                return {name: prepared.values[name] for name in weights}
        groups = [{n: weights[n] for n in names} for names in self._plan.groups.values()]
        found = group_scales(groups, self._recipe.scale_policy)
        return {n: s for names, s in zip(groups, found, strict=True) for n in names}

    def _row(self, name: str, blocks: Tensor, packed: PackedTensor) -> Tensor:
        if name not in self._codes:
            since = [blocks.new_zeros((), dtype=torch.float32)] * 2
        else:
            changed = packed.global_scale != self._scales[name]
            since = [flipped(self._codes[name], packed.codes), changed.float().mean()]
        return torch.cat([measure(blocks, packed), torch.stack(since)])


def summary(rows: Sequence[WeightDrift]) -> dict[str, float]:
    """Means over all weights, under `drift/` and the measure's name; without those not known yet."""
    metrics = {}
    for name in (*NAMES, "flipped_codes", "scale_changes"):
        known = [value for row in rows if (value := asdict(row)[name]) is not None]
        if known:
            metrics[f"drift/{name}"] = sum(known) / len(known)
    return metrics


def _plain(weight: Tensor) -> Tensor:
    data = weight.data
    return data.plain() if isinstance(data, FakeQuantizedTensor) else data


def _drift(name: str, values: list[float], is_first: bool) -> WeightDrift:
    found = LAYER.search(name)
    kind = name[found.end() :] if found else name
    since = [None if is_first else value for value in values[len(NAMES) :]]
    layer = int(found[1]) if found else None
    return WeightDrift(layer, kind.removesuffix(".weight"), *values[: len(NAMES)], *since)
