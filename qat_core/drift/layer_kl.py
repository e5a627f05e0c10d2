"""The KL that rounding each layer alone causes, exactly: over the whole vocabulary.

KL(quantized || BF16) of the next-token distributions, mean over real positions. Layers interact, so
their values need not add up to that of all layers together.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qat_core.drift.monitor import LAYER, trained_values
from qat_core.nvfp4 import dequantize
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.rollout.eager import positions_from_mask
from qat_core.weights.stream import weight_stream


@dataclass(frozen=True)
class LayerKl:
    """Nats a token: of each layer rounded alone, and of all together."""

    by_layer: Mapping[int, float]
    together: float


@torch.no_grad()
def layer_kl(
    model: nn.Module, recipe: Recipe, input_ids: Tensor, attention_mask: Tensor
) -> LayerKl:
    """A forward pass (B, L) a layer, one with no weight rounded and one with all; on one device."""
    plain = {name: trained_values(parameter) for name, parameter in model.named_parameters()}
    rounded = {name: it.to(plain[name].dtype) for name, it in _rounded(model, recipe).items()}
    layers: dict[int, list[str]] = {}
    for name in rounded:
        if found := LAYER.search(name):
            layers.setdefault(int(found[1]), []).append(name)

    def log_probs(names: list[str]) -> Tensor:
        weights = plain | {name: rounded[name] for name in names}
        return _log_probs(model, weights, input_ids, attention_mask)

    exact = log_probs([])
    by_layer = {n: _kl(log_probs(names), exact, attention_mask) for n, names in layers.items()}
    return LayerKl(by_layer, _kl(log_probs(list(rounded)), exact, attention_mask))


class _Bare(nn.Module):
    """Calls a model's forward past its hooks, which would look for prepared weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arguments: Any) -> Any:
        return self.model.forward(**arguments)


def _log_probs(
    model: nn.Module, weights: Mapping[str, Tensor], input_ids: Tensor, attention_mask: Tensor
) -> Tensor:
    arguments = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": positions_from_mask(attention_mask),
        "use_cache": False,
    }
    named = {f"model.{name}": weight for name, weight in weights.items()}
    logits: Tensor = functional_call(_Bare(model), named, kwargs=arguments).logits
    return logits.float().log_softmax(-1)


def _rounded(model: nn.Module, recipe: Recipe) -> dict[str, Tensor]:
    quantized = plan(model, recipe)
    stream: Iterator[Any] = weight_stream(model, quantized, recipe)
    wanted = set(quantized.quantized)
    return {name: dequantize(weight) for name, weight in stream if name in wanted}


def _kl(sampled_BLV: Tensor, exact_BLV: Tensor, mask_BL: Tensor) -> float:
    kl_BL = (sampled_BLV.exp() * (sampled_BLV - exact_BLV)).sum(-1)
    return float((kl_BL * mask_BL).sum() / mask_BL.sum())
