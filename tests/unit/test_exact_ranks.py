"""Sums that two ranks of vLLM share out: the trainer adds what each has rounded.

Factors are small whole numbers, so that sums are exact in any order, and only what is rounded
shows: numbers above 256 lose bits in BF16.
"""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qat_core import Recipe, prepare
from qat_core.exact import make_exact
from qat_core.exact.contract import of_ranks, require_kept
from qat_core.exact.functions import linear
from qat_core.exact.halves import linear_in_halves, sum_by_halves_of_experts, sum_in_halves
from qat_core.exact.model import ONE_RANK, Ranks, ranks_of
from tests.tiny_models import tiny_model, tokens

TWO, EXPERTS = Ranks(2), Ranks(2, expert_parallel=True)
IDS_BT = tokens(2, 9)
INNER, NUM_EXPERTS, TOP_K = 128, 6, 2


def _whole(*shape: int) -> Tensor:
    return torch.randint(
        -8, 9, shape, generator=torch.Generator().manual_seed(sum(shape))
    ).bfloat16()


def _rounded(exact: Tensor) -> Tensor:
    return exact.float().bfloat16()


def _added(ranks: list[Tensor]) -> Tensor:
    """What an all-reduce makes of BF16 numbers."""
    return _rounded(sum(each.double() for each in ranks))


@pytest.mark.parametrize("shape", [(33, INNER), (1, INNER), (2, 5, INNER), (1, 1, INNER)])
def test_halves_of_a_linear_layer_are_rounded_then_added(shape: tuple[int, ...]) -> None:
    x, weight = _whole(*shape), _whole(40, INNER)
    ranks = [
        _rounded(part.double() @ columns.double().T)
        for part, columns in zip(x.chunk(2, -1), weight.chunk(2, -1), strict=True)
    ]
    found = linear_in_halves(x, weight)
    assert torch.equal(found, _added(ranks))
    assert not torch.equal(found, linear(x, weight))


def _pairs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Experts of tokens and their weights, and the pairs in order of experts."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(20, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
    weights = torch.tensor([13, 19])[torch.randint(0, 2, ids.shape, generator=generator)] / 32
    order = ids.flatten().argsort(stable=True)
    ends = ids.flatten().bincount(minlength=NUM_EXPERTS).cumsum(0).int()
    return ids, weights, order, order.argsort(), ends


def _of_rank(x: Tensor, matrices: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """A rank's sum over experts, of x (tokens, k, F) in the router's order."""
    rows = _rounded(torch.einsum("tkf,tkcf->tkc", x.double(), matrices[ids].double()))
    return _rounded((rows.double() * weights[..., None]).sum(1))


def test_tensor_parallel_ranks_have_half_of_each_expert() -> None:
    ids, weights, order, inverse, ends = _pairs()
    x, matrices = _whole(ids.numel(), INNER), _whole(NUM_EXPERTS, 48, INNER)
    by_token = x[inverse].view(*ids.shape, INNER)
    halves = zip(by_token.chunk(2, -1), matrices.chunk(2, -1), strict=True)
    ranks = [_of_rank(*half, ids, weights) for half in halves]
    found = sum_in_halves(x, matrices, ends, weights, order, inverse)
    assert torch.equal(found, _added(ranks))
    assert not torch.equal(found, _of_rank(by_token, matrices, ids, weights))


def test_expert_parallel_ranks_have_half_of_the_experts() -> None:
    ids, weights, order, inverse, _ = _pairs()
    rows = _whole(ids.numel(), 48) * 31
    by_token, is_first = rows[inverse].view(*ids.shape, 48), ids < NUM_EXPERTS // 2
    ranks = [
        _rounded((by_token.double() * (weights * own)[..., None]).sum(1))
        for own in (is_first, ~is_first)
    ]
    found = sum_by_halves_of_experts(rows, weights, order, inverse, is_first)
    assert torch.equal(found, _added(ranks))
    assert not torch.equal(found, _rounded((by_token.double() * weights[..., None]).sum(1)))


def _gradients(function: Any, *arguments: Tensor) -> list[Tensor]:
    leaves = [it.clone().requires_grad_() if it.is_floating_point() else it for it in arguments]
    function(*leaves).sum().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_gradients_are_those_of_one_product() -> None:
    """Of whole numbers, and of what is rounded as if it were not."""
    x, weight = _whole(2, 5, INNER), _whole(40, INNER)
    for found, expected in zip(
        _gradients(linear_in_halves, x, weight), _gradients(F.linear, x, weight), strict=True
    ):
        assert torch.equal(found, expected)


def test_gradients_of_experts_are_those_of_their_sum() -> None:
    ids, weights, order, inverse, ends = _pairs()
    x, matrices = _whole(ids.numel(), INNER), _whole(NUM_EXPERTS, 48, INNER)

    def in_fp64(x: Tensor, matrices: Tensor, weights: Tensor) -> Tensor:
        by_token = x[inverse].view(*ids.shape, INNER).double()
        rows = torch.einsum("tkf,tkcf->tkc", by_token, matrices.double()[ids])
        return (rows * weights[..., None]).sum(1)

    def in_halves(x: Tensor, matrices: Tensor, weights: Tensor) -> Tensor:
        return sum_in_halves(x, matrices, ends, weights, order, inverse)

    for found, expected in zip(
        _gradients(in_halves, x, matrices, weights),
        _gradients(in_fp64, x, matrices, weights),
        strict=True,
    ):
        assert float((found - expected).norm() / expected.norm()) < 0.01


def _logits(model: Any, ranks: Ranks) -> Tensor:
    made = deepcopy(model)
    make_exact(made, ranks)
    assert ranks_of(made) == ranks
    with torch.no_grad():
        logits: Tensor = made(input_ids=IDS_BT, use_cache=False).logits
    return logits


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *(("qwen3", ranks) for ranks in (ONE_RANK, TWO)),
        *(("qwen3-moe", ranks) for ranks in (ONE_RANK, TWO, EXPERTS)),
    ],
    ids=str,
)
def test_a_model_adds_as_ranks_and_prepared_weights_are_rounded_whole(
    family: str, ranks: Ranks
) -> None:
    model = tiny_model(family, head_dim=64)
    prepared = deepcopy(model)
    prepare(prepared, Recipe.full())
    with torch.no_grad():
        for name, weight in prepared.named_parameters():
            if hasattr(weight, "rounded"):
                model.get_parameter(name).copy_(weight.rounded())
    assert torch.equal(_logits(model, ranks), _logits(prepared, ranks))
    is_one = ranks == ONE_RANK
    assert torch.equal(_logits(model, ranks), _logits(model, ONE_RANK)) == is_one


def test_every_weight_of_a_model_on_ranks_has_a_gradient() -> None:
    model = tiny_model("qwen3-moe", head_dim=64)
    prepare(model, Recipe.full())
    make_exact(model, TWO)
    model(input_ids=IDS_BT, use_cache=False).logits.square().sum().backward()
    assert all(float(weight.grad.norm()) > 0 for weight in model.parameters())


def test_the_contract_names_other_ranks() -> None:
    require_kept(of_ranks(TWO), of_ranks(TWO))
    with pytest.raises(ValueError, match="ranks: the trainer needs 1, vLLM has 2"):
        require_kept(of_ranks(ONE_RANK), of_ranks(TWO))
    with pytest.raises(ValueError, match="expert parallel: the trainer needs False, vLLM has True"):
        require_kept(of_ranks(TWO), of_ranks(EXPERTS))


@pytest.mark.parametrize(
    ("ranks", "sizes", "named"),
    [
        (Ranks(4), {}, "4 tensor parallel ranks: use 1 or 2"),
        (TWO, {"num_key_value_heads": 1}, "num_key_value_heads 1: .*; use 1 tensor parallel rank"),
        (TWO, {"intermediate_size": 528}, "intermediate_size 528: .* multiples of 32"),
        (TWO, {"attention_bias": True}, "attention_bias: .*; use 1 tensor parallel rank"),
        (EXPERTS, {}, "qwen3 has no experts"),
    ],
)
def test_ranks_that_cannot_be_exact_are_refused(
    ranks: Ranks, sizes: dict[str, int], named: str
) -> None:
    model = tiny_model("qwen3", head_dim=64, **sizes)
    with pytest.raises(ValueError, match=named):
        make_exact(model, ranks)


def test_two_ranks_are_for_models_that_were_compared_with_them() -> None:
    with pytest.raises(ValueError, match="llama: two ranks were compared for qwen3 and qwen3_moe"):
        make_exact(tiny_model("llama", head_dim=64), TWO)
