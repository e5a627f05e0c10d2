"""What a model keeps rounded in a backward pass, and how often it rounds a weight."""

from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

import qat_core.rounded_weights
from qat_core.preparation import scales_of
from qat_core.rounded_weights import RoundedWeights
from qat_core.scales import Scales


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


def count_roundings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on one entry for each weight that is rounded, or unpacked."""
    found: list[str] = []

    def count(run: Any, *args: Any, **options: Any) -> Tensor:
        found.append(run.__name__)
        out: Tensor = run(*args, **options)
        return out

    for name in ("fake_quantize", "dequantize"):
        counted = partial(count, getattr(qat_core.rounded_weights, name))
        monkeypatch.setattr(qat_core.rounded_weights, name, counted)
    return found
