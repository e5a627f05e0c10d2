"""A checkpointed segment with something else between the products of its backward pass."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qat_core import Recipe, prepare
from tests.prepared_pairs import count_roundings, keep_none, kept, known


class Then(torch.autograd.Function):
    """Nothing in a forward pass; in a backward pass, `act` before the gradient goes on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], Any]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return grad.clone(), None


class Model(nn.Module):
    """One checkpointed segment; in its backward pass `act` comes between two products."""

    def __init__(self, reentrant: bool, act: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
        self.second = nn.Linear(48, 32, bias=False, dtype=torch.bfloat16)
        self.third = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
        self.reentrant, self.act = reentrant, act
        prepare(self, Recipe(), keep="packed")

    def segment(self, x: Tensor) -> Tensor:
        x = Then.apply(F.silu(self.first(x)), lambda: self.act())
        return F.silu(self.third(F.silu(self.second(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.segment, x, use_reentrant=self.reentrant)


def an_input(requires_grad: bool = True) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=requires_grad)


def gradients(model: nn.Module, *others: Tensor) -> list[Tensor]:
    found = [each.grad for each in (*model.parameters(), *others)]
    assert all(grad is not None for grad in found)
    return found


def test_a_weight_without_a_backward_product_is_not_kept() -> None:
    """The input needs no gradient, so that only the gradient of the first weight is computed."""
    found = []
    model = Model(False, lambda: found.append(kept(model)))
    model(an_input(requires_grad=False)).sum().backward()
    assert found == [set()] and not kept(model)
    model(an_input()).sum().backward()
    assert found == [set(), {"first.weight"}] and not kept(model)


def through_data(model: Model) -> None:
    model.first.weight.data.mul_(1.3)


def through_the_state_dict(model: Model) -> None:
    model.state_dict()["first.weight"].mul_(1.3)


def with_other_memory(model: Model) -> None:
    model.first.weight.data = model.first.weight.data * 1.3


def with_all_others(model: Model) -> None:
    for weight in model.parameters():
        weight.data.mul_(1.3)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "write", [through_data, through_the_state_dict, with_other_memory, with_all_others]
)
def test_a_weight_written_between_recompute_and_product_is_rounded_again(
    write: Callable[[Model], None], reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, seen = [], []
    for keep in (True, False):
        if not keep:
            keep_none(monkeypatch)
        model, x = Model(reentrant), an_input()

        @torch.no_grad()
        def act(model: Model = model) -> None:
            seen.append("first.weight" in kept(model))
            write(model)

        model.act = act
        model(x).float().square().sum().backward()
        results.append(gradients(model, x))
    unwritten, y = Model(reentrant), an_input()
    unwritten(y).float().square().sum().backward()
    assert seen == [True, False]
    assert all(map(torch.equal, *results)) and (
        write is with_other_memory or not torch.equal(results[0][-1], y.grad)
    )


def failed(reentrant: bool) -> tuple[Model, Tensor]:
    """A model whose backward pass raised an error, once, and the loss that holds its graph."""

    def fail() -> None:
        raise ZeroDivisionError

    model = Model(reentrant, fail)
    loss = model(an_input()).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    model.act = lambda: None
    return model, loss


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_error_in_a_backward_pass_leaves_nothing(
    reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loss = failed(reentrant)
    del loss
    gc.collect()
    assert not kept(model) and not known(model).kept._recomputed
    model.zero_grad()
    model(an_input()).sum().backward()
    keep_none(monkeypatch)
    expected = Model(reentrant)
    expected(an_input()).sum().backward()
    assert all(map(torch.equal, gradients(model), gradients(expected)))


def test_the_next_pass_reads_nothing_stale_while_a_failed_one_is_held() -> None:
    model, _loss = failed(reentrant=False)
    assert kept(model)  # as what else the recompute saved, until `_loss` goes
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    expected = Model(False)
    expected.load_state_dict(model.state_dict())
    inputs = an_input(), an_input()
    for each, x in zip((model, expected), inputs, strict=True):
        each.zero_grad()
        each(x).sum().backward()
    assert all(map(torch.equal, gradients(model, inputs[0]), gradients(expected, inputs[1])))


def with_steps_in_backward(model: Model, x: Tensor) -> list[Tensor]:
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        act: Any = lambda _, optimizer=optimizer: optimizer.step()  # noqa: E731
        parameter.register_post_accumulate_grad_hook(act)
    for _ in range(2):
        model(model(x)).float().square().sum().backward()
    return list(model.parameters())


def twice(model: Model, x: Tensor) -> list[Tensor]:
    """Both parts of the batch in one segment."""

    def both(x: Tensor) -> Tensor:
        return torch.cat([model.segment(part) for part in x.chunk(2)])

    checkpoint(both, x, use_reentrant=model.reentrant).float().square().sum().backward()
    return gradients(model, x)


def copied(model: Model, x: Tensor) -> list[Tensor]:
    """The weight, and a copy of another dtype, as autocast makes it."""

    def both(x: Tensor) -> Tensor:
        return model.segment(x) + F.linear(x.float(), model.third.weight.float())

    checkpoint(both, x, use_reentrant=model.reentrant).square().sum().backward()
    return gradients(model, x)


def nested(model: Model, x: Tensor) -> list[Tensor]:
    out = checkpoint(lambda x: model(model(x)), x, use_reentrant=model.reentrant)
    out.float().square().sum().backward()
    return gradients(model, x)


def two_passes(model: Model, x: Tensor) -> list[Tensor]:
    out = model(x).float().square().sum()
    out.backward(retain_graph=True)
    out.backward()
    return gradients(model, x)


def second_order(model: Model, x: Tensor) -> list[Tensor]:
    (grad,) = torch.autograd.grad(model(x).float().square().sum(), x, create_graph=True)
    grad.float().square().sum().backward()
    return gradients(model, x)


def frozen(model: Model, x: Tensor) -> list[Tensor]:
    model.requires_grad_(False)
    model(x).float().square().sum().backward()
    return [x.grad]


USES = [with_steps_in_backward, twice, copied, nested, two_passes, second_order, frozen]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of nested ones
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("use", USES)
def test_fewer_roundings_give_the_same_bits(
    use: Callable[[Model, Tensor], list[Tensor]], reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reentrant and use is second_order:
        pytest.skip("PyTorch's reentrant checkpoint has no second derivatives")
    results, counts, roundings = [], [], count_roundings(monkeypatch)
    for keep in (True, False):
        if not keep:
            keep_none(monkeypatch)
        model = Model(reentrant)
        roundings.clear()
        results.append(use(model, an_input()))
        counts.append(len(roundings))
        gc.collect()
        assert not kept(model)
    assert all(map(torch.equal, *results))
    assert counts[0] < counts[1]


def test_copies_made_in_a_backward_pass_keep_nothing() -> None:
    copies: list[Model] = []

    def act() -> None:
        assert kept(model)
        copies.append(copy.deepcopy(model))
        assert not kept(copies[0]) and kept(model)

    model = Model(False, lambda: act())
    model(an_input()).sum().backward()
    assert len(copies) == 1 and not kept(model)


def test_the_graph_of_a_gradient_keeps_what_it_reads() -> None:
    model, x = Model(False), an_input()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    assert kept(model)
    del grad
    assert not kept(model)
    grads = torch.autograd.grad(model.segment(x).square().sum(), x, create_graph=True)
    assert grads[0].requires_grad and not kept(model)  # no checkpoint, no recompute
