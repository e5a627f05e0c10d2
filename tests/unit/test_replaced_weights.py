"""What takes a weight's place: followed where training libraries put it, else refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from qat_core import Recipe, prepare, weight_stream
from qat_core.planning.plan import plan
from qat_core.training.preparation import state_of
from tests.tiny_models import UP, Mlp, assert_follows, fresh, used_mlp, x


@pytest.fixture
def model() -> nn.Module:
    """Prepared and used, so that old scales and rounded values are known."""
    return used_mlp()


def weight_norm(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model.up_proj)


def new_parameter(model: nn.Module) -> None:
    model.up_proj.weight = nn.Parameter(torch.ones(48, 32).bfloat16())


def swap(model: nn.Module) -> None:
    model.zero_grad()
    torch.utils.swap_tensors(model.get_parameter(UP), nn.Parameter(torch.ones(48, 32).bfloat16()))


def other_shape(model: nn.Module) -> None:
    model.get_parameter(UP).data = torch.empty(0)


def new_layer(model: nn.Module) -> None:
    model.up_proj = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # layers are looked at after each step


def another_weight(model: nn.Module) -> None:
    model.gate_proj.weight = model.up_proj.weight


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "weight_norm": (weight_norm, "up_proj.weight: replaced after prepare"),
    "another Parameter": (new_parameter, "up_proj.weight: replaced after prepare"),
    "another layer": (new_layer, r"up_proj.weight: its layer left the model after prepare\(\)"),
    "another weight": (another_weight, "gate_proj.weight: replaced after prepare"),
    "swap_tensors": (swap, "up_proj.weight: replaced after prepare"),
    "half": (lambda model: model.half(), r"proj.weight: became torch.float16 after prepare\(\)"),
    "double": (lambda model: model.double(), r"proj.weight: became torch.float64"),
    ".data of another shape": (other_shape, r"up_proj.weight: assigned .data of shape \(0,\)"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_by_name(
    change: Callable[[nn.Module], Any], message: str, model: nn.Module
) -> None:
    with pytest.raises(ValueError, match=message):
        change(model)
        model(x(model))


@pytest.mark.parametrize("change", [new_parameter, new_layer, another_weight])
def test_what_was_replaced_is_not_packed(
    change: Callable[[nn.Module], Any], model: nn.Module
) -> None:
    change(model)
    with pytest.raises(ValueError, match=r"_proj\.weight: (replaced|would be packed, but prepare)"):
        weight_stream(model, plan(model, Recipe()), Recipe())


def test_shared_weights_that_are_assigned_apart_are_refused() -> None:
    model = Mlp()
    model.gate_proj.weight = model.up_proj.weight
    prepare(model, Recipe())
    model(x(model))
    model.load_state_dict(Mlp().state_dict(), assign=True)
    with pytest.raises(ValueError, match=r"proj\.weight: a module that shared it holds another"):
        model(x(model))


def test_plain_tensors_in_the_place_of_weights_are_refused(model: nn.Module) -> None:
    plain = {name: p.detach() * 1 for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="replaced after prepare"):
        torch.func.functional_call(model, plain, (x(model),))


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
