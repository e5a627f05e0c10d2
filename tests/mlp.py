"""A prepared model of three layers, and what it must do after one of its weights was written."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat_core import Recipe, prepare, weight_stream
from qat_core.nvfp4 import PackedTensor, dequantize
from qat_core.planning.plan import plan

UP = "up_proj.weight"


class Mlp(nn.Module):
    """Gate and up share a scale."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj = nn.Linear(32, 48, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(32, 48, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(48, 32, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def x(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 32, dtype=next(model.parameters()).dtype)


def fresh(model: nn.Module) -> nn.Module:
    """A model that was prepared with the values that `model` holds now."""
    other = Mlp(next(model.parameters()).dtype)
    other.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    prepare(other, Recipe())
    return other


def assert_follows(model: nn.Module, values: Tensor) -> None:
    """Forward pass, with and without the model's own hook, and stream are those of `values`."""
    assert torch.equal(model.get_parameter(UP).detach().flatten(), values.flatten())
    expected = fresh(model)
    assert torch.equal(model.forward(x(model)), expected(x(model)))
    assert torch.equal(model(x(model)), expected(x(model)))
    for name, weight in weight_stream(model, plan(model, Recipe()), Recipe()):
        assert isinstance(weight, PackedTensor)
        parameter: Any = model.get_parameter(name)
        assert torch.equal(dequantize(weight), parameter.rounded().bfloat16())


def used_mlp(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Prepared and used, so that old scales and rounded values are known."""
    model = Mlp(dtype)
    prepare(model, Recipe())
    model(x(model)).sum().backward()
    return model
