"""Long sums of the exact mode, cut into slices. A CPU adds in FP32 what a GPU adds so."""

import pytest
import torch
from torch import Tensor, nn

from qat_core import Recipe, prepare
from qat_core.exact.slices import shared_linear, slices_of

LONG = 8192


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


class _Sliced(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return shared_linear(x, self.weight)


@pytest.mark.parametrize("rows", [(1,), (2, 5)])
def test_a_prepared_weight_is_rounded_whole_and_trained_as_without_slices(
    rows: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(LONG, 32, bias=False, dtype=torch.bfloat16)
    sliced = _Sliced(LONG, 32, bias=False, dtype=torch.bfloat16)
    sliced.load_state_dict(layer.state_dict())
    x = torch.randn(*rows, LONG, dtype=torch.bfloat16)
    expected, found = (_trained(each, x) for each in (layer, sliced))
    for before, after in zip(expected, found, strict=True):
        torch.testing.assert_close(after, before)


def _trained(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    model = nn.Sequential(layer)
    prepare(model, Recipe.full())
    x = x.clone().requires_grad_()
    out = model(x)
    out.float().square().sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    return [out.detach(), x.grad, layer.weight.grad]
