"""Products of the exact mode, and what autograd keeps of them."""

import pytest
import torch
from torch import Tensor, nn

from qat_core import Recipe, prepare
from qat_core.exact.functions import linear
from qat_core.exact.slices import shared_linear

WIDTH = 8192  # whose sums are cut in two


def _prepared(width: int) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 32, bias=False, dtype=torch.bfloat16))
    prepare(model, Recipe.full())
    layer = model[0]
    assert isinstance(layer, nn.Linear)
    return layer


def test_what_lies_behind_a_single_row_reaches_no_gradient() -> None:
    x = torch.randn(2, 128, dtype=torch.bfloat16)
    x[1] = torch.nan
    weight = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    linear(x[:1], weight).sum().backward()
    torch.testing.assert_close(weight.grad, x[:1].expand(64, -1))


@pytest.mark.parametrize("product", [linear, shared_linear])
def test_a_vector_is_multiplied_as_a_row(product: object) -> None:
    assert callable(product)
    layer, x = _prepared(WIDTH), torch.randn(WIDTH, dtype=torch.bfloat16)
    found = [_gradients(layer, product, each) for each in (x, x[None])]
    assert torch.equal(found[0][0], found[1][0][0])
    assert torch.equal(found[0][1], found[1][1])


def _gradients(layer: nn.Linear, product: object, x: Tensor) -> list[Tensor]:
    assert callable(product)
    x, layer.weight.grad = x.clone().requires_grad_(), None
    product(x, layer.weight).sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    return [x.grad, layer.weight.grad]


@pytest.mark.parametrize("trained", ["x", "weight"])
def test_only_what_a_gradient_needs_is_kept(trained: str) -> None:
    layer, x = _prepared(128), torch.randn(3, 128, dtype=torch.bfloat16)
    layer.weight.requires_grad_(trained == "weight")
    x.requires_grad_(trained == "x")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda it: kept.append(it) or it, lambda it: it):
        linear(x, layer.weight)
    assert [it.shape for it in kept] == [{"x": layer.weight, "weight": x}[trained].shape]
