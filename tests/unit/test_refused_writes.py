"""What takes the place of a prepared weight without being one is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from qat_core import Recipe, prepare, weight_stream
from qat_core.planning.plan import plan
from tests.mlp import UP, Mlp, used_mlp, x


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


def spoil(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter(UP)[3, 5] = 3.38e38  # finite, but rounds up to infinity


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
    "too large": (spoil, "up_proj.weight: holds NaN or infinity"),
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
