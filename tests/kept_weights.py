"""What a model keeps rounded in a backward pass, and how often it rounds a weight."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import pytest
from torch import nn

from qat_core.training import straight_through
from qat_core.training.preparation import state_of
from qat_core.training.state import rounded_weights
from qat_core.training.state.rounded_weights import RoundedWeights
from qat_core.training.state.weight_state import WeightState


def known(model: nn.Module) -> WeightState:
    state = state_of(model)
    assert state is not None
    return state


def kept(model: nn.Module) -> set[str]:
    """Names of the weights that are kept rounded at the moment."""
    held = known(model).kept._recomputed.items()
    return {name for (name, _), each in held if each.rounded is not None}


def keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on each use of a weight rounds it."""
    monkeypatch.setattr(RoundedWeights, "share", lambda *_: None)


def count_roundings(
    monkeypatch: pytest.MonkeyPatch, functions: Sequence[str] = ("fake_quantize", "dequantize")
) -> list[str]:
    """From now on the function's name for each weight that one of these rounds, or unpacks."""
    found: list[str] = []

    def count(run: Any, *args: Any, **options: Any) -> Any:
        weights = [args[0]] if run.__name__ != "measure_and_round" else chain.from_iterable(args[0])
        found.extend(run.__name__ for _ in weights)
        return run(*args, **options)

    for name in functions:
        is_rounding = name == "fake_quantize"
        module = straight_through if is_rounding else rounded_weights
        monkeypatch.setattr(module, name, partial(count, getattr(module, name)))
    return found
