"""What a model keeps rounded in a backward pass, and how often it rounds a weight."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import pytest
from torch import nn

import qat_core.training.rounded_weights
from qat_core.training.preparation import scales_of
from qat_core.training.rounded_weights import RoundedWeights
from qat_core.training.scales import Scales


def known(model: nn.Module) -> Scales:
    scales = scales_of(model)
    assert scales is not None
    return scales


def kept(model: nn.Module) -> set[str]:
    """Names of the weights that are kept rounded at the moment."""
    held = known(model).rounded._recomputed.items()
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
        counted = partial(count, getattr(qat_core.training.rounded_weights, name))
        monkeypatch.setattr(qat_core.training.rounded_weights, name, counted)
    return found
