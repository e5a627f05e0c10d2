"""What of a sync gets to no parameter, for loaders that vLLM's models have; needs no vLLM."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from qat_core.rollout.vllm.landing import Landing

Weights = Iterable[tuple[str, Tensor]]
Load = Callable[[Tensor], None]


def _one_by_one(weights: Weights, load: Load, dropped: str) -> None:
    for name, weight in weights:
        if name != dropped:
            load(weight.contiguous())


def _all_at_the_end(weights: Weights, load: Load, dropped: str) -> None:
    """In slices, as that of Granite's experts."""
    for name, weight in list(weights):
        if name != dropped:
            load(weight[1:].T)


@pytest.mark.parametrize("dropped", ["", "first", "second", "last"])
@pytest.mark.parametrize("loader", [_one_by_one, _all_at_the_end])
def test_a_tensor_that_a_loader_drops_is_named(
    loader: Callable[[Weights, Load, str], None], dropped: str
) -> None:
    landed = Landing()
    weights = ((name, torch.ones(2, 2).T) for name in ("first", "second", "last"))
    loader(landed.noted(weights), landed.counting(lambda _: None), dropped)
    if not dropped:
        landed.require_all(nn.Linear(1, 1))
        return
    with pytest.raises(ValueError, match=f"^weight sync: {dropped}: sent, but vLLM's Linear puts"):
        landed.require_all(nn.Linear(1, 1))
