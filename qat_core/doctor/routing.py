"""Which experts a mixture of experts chose: recorded in one forward pass, replayed in another.

Routers are the modules named `gate` or `router` that are no linear layer: transformers 5 lets them
return (logits, weights, ids), each with a row a token.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qat_core.routing import by_block, replay

NAMES = ("gate", "router")


@dataclass(frozen=True)
class Layer:
    """One router's decisions: experts (B, L, k) int64, their weights, its inputs (B, L, H)."""

    ids: Tensor
    weights: Tensor
    inputs: Tensor


@dataclass(frozen=True)
class Routes:
    """All routers' decisions, from the first layer to the last."""

    layers: tuple[Layer, ...]

    def select(self, rows: slice) -> "Routes":
        """Of some of the sequences."""
        return Routes(tuple(Layer(*(t[rows] for t in vars(it).values())) for it in self.layers))


def routers(model: nn.Module) -> list[nn.Module]:
    """The model's routers from the first layer to the last; none in a dense model."""
    return [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in NAMES and not isinstance(module, nn.Linear)
    ]


class Recorder:
    """Collects routes over the forward passes of a decoding, which bring a few positions each."""

    def __init__(self, num_sequences: int) -> None:
        self._num_sequences = num_sequences
        self._parts: dict[int, list[Layer]] = {}

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Records what the model's routers choose inside."""
        with ExitStack() as hooks:
            for layer, router in enumerate(routers(model)):
                hooks.enter_context(router.register_forward_hook(partial(self._note, layer)))
            yield

    def routes(self) -> Routes | None:
        """All positions so far; None if the model has no routers."""
        layers = [self._parts[layer] for layer in sorted(self._parts)]
        joined = [zip(*(vars(part).values() for part in parts), strict=True) for parts in layers]
        whole = tuple(Layer(*(torch.cat(tensors, 1) for tensors in it)) for it in joined)
        return Routes(whole) if whole else None

    def _note(self, layer: int, _: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> None:
        _logits, weights, ids = output
        parts = (t.view(self._num_sequences, -1, t.shape[-1]) for t in (ids, weights, *inputs))
        self._parts.setdefault(layer, []).append(Layer(*parts))


@torch.no_grad()
def disagreement(model: nn.Module, routes: Routes, mask_BL: Tensor) -> tuple[float, float]:
    """How the model's routers differ from the recorded ones on the recorded inputs.

    The share of decisions with another set of experts, and the mean difference of the weights of
    the same experts relative to their mean. What the inputs owe to faults elsewhere plays no part.
    """
    real = mask_BL.flatten() > 0
    other, difference, total = [], 0.0, 0.0
    for router, layer in zip(routers(model), routes.layers, strict=True):
        _, weights, ids = router(layer.inputs.flatten(0, 1))
        found, recorded = _by_expert(ids, weights), _by_expert(layer.ids, layer.weights)
        differs = (found[0] != recorded[0]).any(-1)
        same = real & ~differs
        other.append(differs[real])
        difference += float((found[1] - recorded[1])[same].abs().sum())
        total += float(recorded[1][same].sum())
    return float(torch.cat(other).float().mean()), difference / max(total, 1e-9)


def _by_expert(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """A row a token, its experts in ascending order."""
    ordered, places = ids.flatten(0, -2).sort(-1)
    return ordered, weights.flatten(0, -2).float().gather(-1, places)


@contextmanager
def replayed(model: nn.Module, routes: Routes | None, *, weights: bool) -> Iterator[None]:
    """Inside, the model's tokens go to the recorded experts; None changes nothing.

    Without `weights` the router weighs the given experts again.
    """
    layers = routes.layers if routes else ()
    if layers and not weights:
        ids = torch.stack([layer.ids for layer in layers], dim=-2)
        with replay(model, by_block(model, ids)):
            yield
        return
    with ExitStack() as hooks:
        for router, layer in zip(routers(model), layers, strict=bool(layers)):
            chosen = layer.weights.flatten(0, 1), layer.ids.flatten(0, 1)
            hooks.enter_context(router.register_forward_hook(partial(_replace, chosen)))
        yield


def _replace(chosen: tuple[Tensor, Tensor], _: nn.Module, _inputs: Any, output: Any) -> Any:
    return output[0], *chosen
