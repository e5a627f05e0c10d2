"""Products of the exact mode: what they add, what autograd keeps. A CPU cuts sums as a GPU does."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat_core import Recipe, prepare
from qat_core.exact.functions import linear
from qat_core.exact.halves import linear_in_halves
from qat_core.exact.slices import shared_linear, slices_of

Product = Callable[[Tensor, Tensor], Tensor]
LONG = 8192  # sums that are cut in two


def _prepared(width: int) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(width, 32, bias=False, dtype=torch.bfloat16)
    prepare(nn.Sequential(layer), Recipe.full())
    return layer


def _trained(layer: nn.Linear, product: Product, x: Tensor) -> list[Tensor]:
    """The result, and the gradients of x and the weight."""
    x, layer.weight.grad = x.clone().requires_grad_(), None
    out = product(x, layer.weight)
    out.float().square().sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    return [out.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize(
    ("n", "k", "count"),
    [
        pytest.param(4096, 12288, 2, id="qwen3-8b-down"),
        pytest.param(2048, 4096, 2, id="qwen3-30b-a3b-o"),
        pytest.param(4096, 4096, 1, id="as-wide-as-long"),
        pytest.param(576, 1536, 1, id="short"),
        pytest.param(1024, 4096 + 64, 1, id="halves-are-no-whole-stages"),
    ],
)
def test_sums_are_cut_where_they_are_long_and_the_layer_is_narrow(
    n: int, k: int, count: int
) -> None:
    assert slices_of(n, k) == count


@pytest.mark.parametrize("rows", [(1,), (2, 5)])
def test_a_prepared_weight_is_rounded_whole_and_trained_as_without_slices(
    rows: tuple[int, ...],
) -> None:
    layer, x = _prepared(LONG), torch.randn(*rows, LONG, dtype=torch.bfloat16)
    expected, found = (_trained(layer, product, x) for product in (F.linear, shared_linear))
    for before, after in zip(expected, found, strict=True):
        torch.testing.assert_close(after, before)


@pytest.mark.parametrize("product", [linear, shared_linear])
def test_a_vector_is_multiplied_as_a_row(product: Product) -> None:
    layer, x = _prepared(LONG), torch.randn(LONG, dtype=torch.bfloat16)
    of_vector, of_row = (_trained(layer, product, each) for each in (x, x[None]))
    for vector, row in zip(of_vector, of_row, strict=True):
        assert torch.equal(vector, row.view_as(vector))


@pytest.mark.parametrize("product", [linear, shared_linear, linear_in_halves])
def test_no_rows_have_no_result(product: Product) -> None:
    layer = _prepared(LONG)
    assert product(torch.empty(1, 0, LONG).bfloat16(), layer.weight).shape == (1, 0, 32)


def test_what_lies_behind_a_single_row_reaches_no_gradient() -> None:
    x = torch.randn(2, 128, dtype=torch.bfloat16)
    x[1] = torch.nan
    weight = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    linear(x[:1], weight).sum().backward()
    torch.testing.assert_close(weight.grad, x[:1].expand(64, -1))


@pytest.mark.parametrize("trained", ["x", "weight"])
def test_only_what_a_gradient_needs_is_kept(trained: str) -> None:
    layer, x = _prepared(128), torch.randn(3, 128, dtype=torch.bfloat16)
    layer.weight.requires_grad_(trained == "weight")
    x.requires_grad_(trained == "x")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda it: kept.append(it) or it, lambda it: it):
        linear(x, layer.weight)
    assert [it.shape for it in kept] == [{"x": layer.weight, "weight": x}[trained].shape]
