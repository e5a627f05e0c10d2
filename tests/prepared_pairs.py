"""A prepared model beside a plain one rounded by hand; what it keeps rounded, and how often."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat_core.nvfp4 import fake_quantize, global_scale, group_amax
from qat_core.options import Keep
from qat_core.planning.plan import QuantPlan
from qat_core.planning.recipe import Recipe
from qat_core.training import straight_through
from qat_core.training.preparation import prepare, state_of
from qat_core.training.state import rounded_weights
from qat_core.training.state.rounded_weights import RoundedWeights
from qat_core.training.state.weight_state import WeightState
from tests.tiny_models import tiny_model, tokens


def pair(
    family: str,
    experts: str | None = None,
    recipe: Recipe | None = None,
    *,
    keep: Keep | None = None,
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A prepared model, and a plain one that holds the rounded weights."""
    model, oracle = tiny_model(family), tiny_model(family)
    if experts:
        model.set_experts_implementation(experts)
        oracle.set_experts_implementation(experts)
    recipe = recipe or Recipe()
    round_weights(oracle, prepare(model, recipe, keep=keep), recipe)
    return model, oracle


@torch.no_grad()
def round_weights(model: nn.Module, plan: QuantPlan, recipe: Recipe) -> None:
    weights = dict(model.named_parameters())
    for names in plan.groups.values():
        members = [weights[name] for name in names]
        scale = global_scale(group_amax([members])[0], recipe.scale_policy)
        for weight in members:
            weight.copy_(fake_quantize(weight, scale, recipe.block_scale_method))


def run(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and all gradients of one step."""
    model.zero_grad()
    ids = tokens().to(model.device)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.logits, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_run(model: PreTrainedModel, oracle: PreTrainedModel) -> None:
    """Equal in every bit: both multiply the same numbers with the same kernels."""
    (logits, grads), (expected, expected_grads) = run(model), run(oracle)
    assert torch.equal(logits, expected)
    assert {n for n, g in grads.items() if not torch.equal(g, expected_grads[n])} == set()


def known(model: nn.Module) -> WeightState:
    return state_of(model)


def kept(model: nn.Module) -> set[str]:
    """Names of the weights that are kept rounded at the moment."""
    held = known(model).kept._recomputed.items()
    return {name for (name, _), each in held if each.rounded is not None}


def keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on each use of a weight rounds it."""
    monkeypatch.setattr(RoundedWeights, "share", lambda *_: None)


def count_roundings(
    monkeypatch: pytest.MonkeyPatch, functions: Sequence[str] = ("fake_quantize", "dequantize")
) -> list[str]:
    """From now on the function's name for each weight that one of these rounds, or unpacks."""
    found: list[str] = []

    def count(run: Any, *args: Any, **options: Any) -> Any:
        weights = [args[0]] if run.__name__ != "measure_and_round" else chain.from_iterable(args[0])
        found.extend(run.__name__ for _ in weights)
        return run(*args, **options)

    for name in functions:
        is_rounding = name == "fake_quantize"
        module = straight_through if is_rounding else rounded_weights
        monkeypatch.setattr(module, name, partial(count, getattr(module, name)))
    return found
