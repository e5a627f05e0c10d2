"""What training libraries do with weights: averages, functional calls, hooks, another dtype."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from qat_core import Recipe, prepare
from qat_core.training.preparation import state_of
from tests.mlp import UP, Mlp, assert_follows, fresh, used_mlp, x


@pytest.fixture
def model() -> nn.Module:
    """Prepared and used, so that old scales and rounded values are known."""
    return used_mlp()


def test_a_new_dtype_through_data_is_the_weights() -> None:
    """As accelerate upcasts before it shards."""
    model = Mlp()
    prepare(model, Recipe())
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    weight: Any = model.get_parameter(UP)
    assert weight.rounded().dtype == torch.float32
    assert_follows(model, Mlp().get_parameter(UP).detach().float())


def test_averaged_models_follow(model: nn.Module) -> None:
    average = AveragedModel(model, avg_fn=lambda _, current, __: current * 2)
    average.update_parameters(model)
    average.update_parameters(model)
    assert_follows(average.module, model.get_parameter(UP).detach() * 2)
    assert_follows(model, Mlp().get_parameter(UP).detach())


def test_tensors_that_take_the_place_for_a_call_are_followed_and_left(model: nn.Module) -> None:
    expected = model(x(model))
    for grad_mode in (torch.enable_grad, torch.no_grad):
        with grad_mode():
            others = {name: p.detach().mT.mT for name, p in model.named_parameters()}
            others[UP] = model.get_parameter(UP).detach().t().contiguous().t()
            with torch.no_grad():
                others[UP].mul_(8)
            called = torch.func.functional_call(model, others, (x(model),))
        single = Mlp()
        single.load_state_dict({**single.state_dict(), UP: single.state_dict()[UP] * 8})
        prepare(single, Recipe())
        assert torch.equal(called, single(x(model)))
        assert torch.equal(model(x(model)), expected)


def test_an_optimizer_in_backward_refreshes_once_a_step(model: nn.Module) -> None:
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        step: Any = lambda _, optimizer=optimizer: optimizer.step()  # noqa: E731
        parameter.register_post_accumulate_grad_hook(step)
    plain = fresh(model)
    model.zero_grad()
    together = torch.optim.SGD(plain.parameters(), lr=0.5)
    state = state_of(model)
    assert state is not None
    before = state.num_refreshes
    for _ in range(3):
        model(x(model)).float().pow(2).sum().backward()
        plain(x(model)).float().pow(2).sum().backward()
        together.step()
        for each in (model, plain):
            each.zero_grad()
    assert state.num_refreshes - before == 2  # the first forward pass found nothing new
    assert_follows(model, plain.get_parameter(UP).detach())


def test_hooks_and_attributes_stay_on_the_parameter() -> None:
    model, calls = Mlp(), []
    weight: Any = model.get_parameter(UP)
    weight.no_decay = True
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    handle = weight.register_hook(lambda grad: calls.append("hook"))
    prepare(model, Recipe())
    model(x(model)).sum().backward()
    assert calls == ["hook", "after"] and model.get_parameter(UP).no_decay  # type: ignore[attr-defined]
    handle.remove()
    model(x(model)).sum().backward()
    assert calls == ["hook", "after", "after"]
    assert copy.deepcopy(model)(x(model)).equal(model(x(model)))
