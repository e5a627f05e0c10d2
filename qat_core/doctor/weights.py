"""Three sets of numbers for one model, and why they differ, weight by weight.

* served: what the rollout engine computes with,
* sent: what a sync of the trainer's weights would bring now,
* trained: what the trainer's matrix products read.

Served and sent have to be the same bits; sent and trained are if training rounds as rollouts do.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from qat_core.checkpoint.architecture import meta_model
from qat_core.checkpoint.load import load_model
from qat_core.checkpoint.read import read_checkpoint
from qat_core.checkpoint.shards import read_json
from qat_core.nvfp4 import PackedTensor, dequantize
from qat_core.options import BlockScaleMethod, ScalePolicy
from qat_core.planning.plan import Entry, bf16_plan, plan
from qat_core.planning.recipe import Recipe
from qat_core.weights.hub_names import HubNames, Weight
from qat_core.weights.stream import weight_stream

# of a model's matrices; what more differ than this is another version of the model
STALE_FRACTION = 0.5


def packed(model: nn.Module, recipe: Recipe | None) -> dict[str, Weight]:
    """All weights as a sync by `recipe` sends them; None sends BF16."""
    return dict(weight_stream(model, plan(model, recipe) if recipe else None, recipe))


def numbers(weight: Weight) -> Tensor:
    """The numbers that a weight stands for, BF16 if it is packed."""
    return dequantize(weight) if isinstance(weight, PackedTensor) else weight


@dataclass(frozen=True)
class Versions:
    """The three sets; a cause a weight where two of them differ."""

    served: Mapping[str, Tensor]
    sent: Mapping[str, Weight]
    trained: Mapping[str, Weight]
    # `weights`, `staleness` or `scale` where served and sent differ
    blame_served: Mapping[str, str]
    blame_sent: Mapping[str, str]  # `quantization` or `scale` where sent and trained differ

    def mixed(self, broken: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
        """The trainer's numbers, but for those that a cause in `broken` changes."""
        for name, trained in self.trained.items():
            if self.blame_served.get(name) in broken:
                yield name, self.served[name]
            elif self.blame_sent.get(name) in broken:
                yield name, numbers(self.sent[name])
            else:
                yield name, numbers(trained)

    def blamed(self, cause: str) -> list[str]:
        """Names of the weights that a cause changes."""
        blames = (self.blame_served, self.blame_sent)
        return [n for blame in blames for n, why in blame.items() if why == cause]


def compare(
    model: nn.Module,
    served: Mapping[str, Tensor],
    rolled_out: Recipe | None,
    trained: Recipe | None,
    previous: Callable[[], nn.Module] | None,
) -> Versions:
    """Finds a cause for every weight that differs between the engine's numbers and the trainer's.

    `previous` loads the model as it was at the last sync but one, to tell what is stale.

    Raises:
        ValueError: the engine's weights have other names or shapes than the trainer's. More rows
            are allowed: padding of a vocabulary, which the vocabulary's probe looks at.
    """
    sent, known = packed(model, rolled_out), packed(model, trained)
    _require_same_shapes(served, sent)
    served = {name: served[name][: weight.shape[0]] for name, weight in sent.items()}
    differing = {name for name, weight in sent.items() if not _same(served[name], weight)}
    by_policy = _of_other_policies(model, rolled_out, served, differing)
    changed = differing - by_policy
    if previous is not None and changed:
        old = packed(previous(), rolled_out)
        stale = {name for name in changed if name in old and _same(served[name], old[name])}
    else:
        matrices = [name for name, weight in sent.items() if len(weight.shape) > 1]
        moved = [name for name in matrices if name in changed]
        stale = changed if len(moved) > STALE_FRACTION * len(matrices) else set()
    blame = {n: "scale" if n in by_policy else "staleness" for n in by_policy | stale}
    return Versions(
        served=served,
        sent=sent,
        trained=known,
        blame_served={n: blame.get(n, "weights") for n in sent if n in differing},
        blame_sent=dict(_differences(sent, known)),
    )


def _differences(
    sent: Mapping[str, Weight], trained: Mapping[str, Weight]
) -> Iterable[tuple[str, str]]:
    for name, weight in sent.items():
        both = isinstance(weight, PackedTensor) and isinstance(trained[name], PackedTensor)
        if not torch.equal(numbers(weight), numbers(trained[name])):
            yield name, "scale" if both else "quantization"


def _of_other_policies(
    model: nn.Module, recipe: Recipe | None, served: Mapping[str, Tensor], differing: set[str]
) -> set[str]:
    """Weights that are those of now, packed by another rule for their scales."""
    found: set[str] = set()
    for policy, method in product(get_args(ScalePolicy), get_args(BlockScaleMethod)):
        if recipe and (left := differing - found):
            other = recipe.model_copy(update={"scale_policy": policy, "block_scale_method": method})
            stream = packed(model, other).items()
            found |= {name for name, w in stream if name in left and _same(served[name], w)}
    return found


def _same(served: Tensor, weight: Weight) -> bool:
    return torch.equal(served, numbers(weight).to(served))


def _require_same_shapes(served: Mapping[str, Tensor], sent: Mapping[str, Weight]) -> None:
    for name, weight in sent.items():
        shape = served[name].shape if name in served else torch.Size((0,))
        if shape[1:] != weight.shape[1:] or shape[0] < weight.shape[0]:
            held = tuple(served[name].shape) if name in served else "nothing"
            raise ValueError(
                f"{name}: the engine holds {held}, the trainer {tuple(weight.shape)}: "
                "compare checkpoints of one architecture"
            )


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
