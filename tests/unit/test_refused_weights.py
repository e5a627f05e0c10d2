"""Weights that are not finite in BF16 reach neither an engine nor a checkpoint, packed."""

from pathlib import Path

import pytest
import torch
from torch import nn

from qat_core.checkpoint import export
from qat_core.plan import plan
from qat_core.preparation import prepare
from qat_core.recipe import Recipe
from qat_core.weights.stream import weight_stream
from tests.tiny_models import tiny_model

WEIGHTS = {
    "qwen3": "model.layers.1.mlp.up_proj.weight",
    "qwen3-moe": "model.layers.1.mlp.experts.gate_up_proj",
}


# the last is finite in FP32 and rounds to infinity in BF16
@pytest.fixture(params=[float("nan"), float("-inf"), 3.4e38], ids=str)
def bad(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture(params=["qwen3", "qwen3-moe"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str, bad: float) -> nn.Module:
    """An FP32 model, one value of which is bad."""
    model = tiny_model(family).float()
    _spoil(model, family, bad)
    return model


def _spoil(model: nn.Module, family: str, bad: float) -> None:
    with torch.no_grad():
        model.get_parameter(WEIGHTS[family]).view(-1)[70] = bad


def test_a_stream_is_refused_before_its_first_weight(model: nn.Module, family: str) -> None:
    stream = weight_stream(model, plan(model, Recipe()), Recipe())
    with pytest.raises(ValueError, match=f"^{WEIGHTS[family]}: holds NaN or infinity"):
        next(stream)


def test_a_prepared_models_stream_is_refused(family: str, bad: float) -> None:
    model = tiny_model(family).float()
    checked = prepare(model, Recipe())
    _spoil(model, family, bad)
    with pytest.raises(ValueError, match=f"^{WEIGHTS[family]}: holds NaN or infinity"):
        next(weight_stream(model, checked, Recipe()))


def test_an_export_is_refused_and_leaves_nothing(
    model: nn.Module, family: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"^{WEIGHTS[family]}: holds NaN or infinity"):
        export(model, Recipe(), tmp_path / "packed")
    assert not list(tmp_path.iterdir())


def test_what_is_not_packed_may_hold_anything(model: nn.Module, family: str) -> None:
    name = WEIGHTS[family]
    streamed = dict(weight_stream(model, None, None))
    assert torch.equal(
        torch.as_tensor(streamed[name]).isfinite(), model.get_parameter(name).bfloat16().isfinite()
    )
