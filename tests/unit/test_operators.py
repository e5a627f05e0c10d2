"""What operators make of a fake-quantized weight: its rounded values, or an error with its name."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qat_core.parameter import FakeQuantizedTensor
from qat_core.preparation import prepare
from qat_core.recipe import Recipe
from tests.tiny_models import tiny_model


@torch.library.custom_op("qat_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.mT


@torch.library.custom_op("qat_tests::sgd_", mutates_args=("weight",))
def sgd_(weight: Tensor, grad: Tensor) -> None:
    weight.sub_(grad)


# Times one, the product of a matrix is the matrix, in every bit.
ONE, ONES = torch.eye(64).bfloat16(), torch.eye(32).bfloat16().expand(6, 32, 32)
FIRST_EXPERT = torch.zeros(1, 64, 32, dtype=torch.long)
Weights = tuple[FakeQuantizedTensor, FakeQuantizedTensor]
Use = Callable[[Tensor, Tensor], Tensor]
# Of a linear weight (32, 64) and of experts (6, 64, 32).
ROUNDED: dict[str, Use] = {
    "linear": lambda w, _: F.linear(ONE, w),
    "matmul": lambda w, _: w @ ONE,
    "custom kernel": lambda w, _: product(ONE, w),
    "transpose": lambda w, _: ONE @ w.t(),
    "copied transpose": lambda w, _: ONE @ w.t().contiguous(),
    "cloned transpose": lambda w, _: ONE @ w.t().clone(),
    "rows": lambda w, _: torch.cat([rows @ ONE for rows in w.split([8, 24])]),
    "experts": lambda _, e: e.bmm(ONES),
    "copied experts": lambda _, e: ONES.bmm(e.transpose(1, 2).contiguous()),
    "each expert": lambda _, e: torch.stack([expert @ ONES[0] for expert in e]),
    "copied expert": lambda _, e: e[-1].clone() @ ONES[0],
    "gate and up": lambda _, e: torch.cat([half.bmm(ONES) for half in e.split([16, 48], 1)], 1),
    "copied gate": lambda _, e: e.chunk(2, 1)[0].contiguous().bmm(ONES),
    "chosen experts": lambda _, e: e[[1, 0]].bmm(ONES[:2]),
    "gathered experts": lambda _, e: torch.gather(e, 0, FIRST_EXPERT).bmm(ONES[:1]),
}
REFUSED: dict[str, Use] = {
    "unsqueeze": lambda w, _: w.unsqueeze(0),
    "squeeze": lambda w, _: w.squeeze(0),
    "diagonal": lambda w, _: w.diagonal(),
    "unfold": lambda w, _: w.unfold(0, 3, 1),
    "other dtype": lambda w, _: w.view(torch.int16),
    "einsum": lambda w, _: torch.einsum("bi,oi->bo", ONE, w),
    "einsum of experts": lambda _, e: torch.einsum("ebi,eoi->ebo", ONES, e),
    "conv1d": lambda w, _: F.conv1d(ONE[None], w[..., None]),
    "permuted experts": lambda _, e: e.movedim(0, 1),
    "some experts": lambda _, e: e[1:3].bmm(ONES[:2]),
    "all experts as one": lambda _, e: e @ ONES[0],
    "one row": lambda w, _: ONE @ w[0],
    "columns": lambda w, _: ONE[:, :16] @ w[:, 8:24].t(),
    "columns, transposed": lambda w, _: ONE[:, :16] @ w.t()[8:24],
}


@pytest.fixture
def weights() -> Weights:
    """A linear weight and experts of a prepared model."""
    model = tiny_model("qwen3-moe")
    prepare(model, Recipe())
    layer = model.model.layers[0]
    return layer.self_attn.k_proj.weight, layer.mlp.experts.down_proj


@pytest.mark.parametrize("use", ROUNDED.values(), ids=ROUNDED)
def test_products_read_rounded_values(use: Use, weights: Weights) -> None:
    expected = use(*(weight.rounded() for weight in weights))
    assert torch.equal(use(*weights), expected)
    assert not torch.equal(use(*(weight.plain() for weight in weights)), expected)


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_refuses_what_it_cannot_round(use: Use, weights: Weights) -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.(self_attn\.k_proj|mlp\.experts\.down_proj)"):
        use(*weights)


@torch.no_grad()
def test_kernels_of_optimizers_write_the_weight(
    weights: Weights,
) -> None:
    weight, before = weights[0], weights[0].plain().clone()
    sgd_(weight, -before)
    assert torch.equal(weight.plain(), before * 2) and weight.scales.weights.stale
    weight.scales.refresh_if_stale()
    torch.mm(before, ONE, out=weight)
    assert torch.equal(weight.plain(), before) and weight.scales.weights.stale


@torch.no_grad()
def test_copies_of_the_whole_weight_and_of_shards_are_plain(
    weights: Weights,
) -> None:
    for weight in weights:
        assert type(weight.clone()) is type(weight.detach()[:2].clone()) is Tensor
        assert torch.equal(weight.clone(), weight.plain())


@torch.no_grad()
def test_a_copied_view_keeps_its_values(
    weights: Weights,
) -> None:
    weight = weights[0]
    copied, rounded = weight.t().contiguous(), weight.rounded().clone()
    weight.mul_(2)
    assert torch.equal(ONE @ copied, rounded.t())
    assert torch.equal(ONE @ weight.t(), rounded.t() * 2)
