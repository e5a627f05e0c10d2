"""`prepare(keep=...)`: what is kept until a weight changes has the same bits, and goes in time."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError

from qat_core.options import Keep, ScalePolicy
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.training.state.rounded_weights import RoundedWeights
from tests.kept_weights import count_roundings, known
from tests.prepared_pairs import assert_same_run, pair, round_weights
from tests.tiny_models import tiny_model

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
CASES = [("qwen3", None), *(("qwen3-moe", experts) for experts in EXPERTS_IMPLEMENTATIONS)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize(("family", "experts"), CASES)
@pytest.mark.parametrize(
    ("keep", "rounding"), [("packed", "quantize"), ("rounded", "measure_and_round")]
)
def test_weights_that_are_kept_give_the_same_bits_and_are_rounded_once_a_change(
    keep: Keep,
    rounding: str,
    family: str,
    experts: str | None,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, oracle = pair(family, experts, keep=keep)
    model, oracle = model.to(device), oracle.to(device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    num_weights = len(known(model).values)
    rounded = count_roundings(monkeypatch, ("quantize", "fake_quantize", "measure_and_round"))
    for _ in range(2):  # micro-batches
        assert_same_run(model, oracle)
    assert rounded == num_weights * [rounding]
    rounded.clear()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    copied = tiny_model(family).to(device)
    if experts:
        copied.set_experts_implementation(experts)
    copied.load_state_dict(model.state_dict())
    round_weights(copied, plan(copied, Recipe()), Recipe())
    for _ in range(2):
        assert_same_run(model, copied)
    assert rounded == num_weights * [rounding]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("policy", ["pow2", "amax"])
@pytest.mark.parametrize("change", [1.0, 1.9, 0.0], ids=["same-scales", "new-scales", "zeros"])
def test_weights_that_are_rounded_while_they_are_measured_have_the_new_scales(
    change: float, policy: ScalePolicy, device: str
) -> None:
    recipe = Recipe(scale_policy=policy)
    model, oracle = pair("qwen3-moe", "eager", recipe, keep="rounded")
    model, oracle = model.to(device), oracle.to(device)
    assert_same_run(model, oracle)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(change)
    oracle.load_state_dict(model.state_dict())
    round_weights(oracle, plan(oracle, recipe), recipe)
    assert_same_run(model, oracle)


@pytest.mark.parametrize(
    ("keep", "first_of"),
    [
        ("packed", lambda rounded: next(iter(rounded._packed.values())).codes),
        ("rounded", lambda rounded: next(iter(rounded._whole.values())).rounded),
    ],
    ids=["packed", "rounded"],
)
def test_what_is_kept_goes_when_its_weight_moves(
    keep: Keep, first_of: Callable[[RoundedWeights], Tensor]
) -> None:
    model, oracle = pair("qwen3", keep=keep)
    assert_same_run(model, oracle)
    state = known(model)
    kept = weakref.ref(first_of(state.kept))
    model.to("meta")
    assert kept() is None


def test_an_unknown_way_to_keep_weights_is_refused() -> None:
    with pytest.raises(ValueError, match='keep: needs "packed", "rounded" or None, got True'):
        pair("qwen3", keep=True)


@pytest.mark.parametrize("keep", ["packed", "rounded"])
def test_compiled_layers_refuse_to_keep_weights(keep: Keep) -> None:
    model, _ = pair("qwen3", keep=keep)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    with pytest.raises(TorchRuntimeError, match=r"keep: layers compiled by torch\.compile"):
        model(torch.zeros(1, 4, dtype=torch.long))
