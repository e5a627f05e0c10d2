"""The fake-quantized parameter against a model whose weights were rounded by hand."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from qat_core.planning.recipe import Recipe
from qat_core.training.parameter import FakeQuantizedTensor
from qat_core.training.preparation import prepare
from tests.prepared_pairs import assert_same_run, pair, run
from tests.tiny_models import tiny_model, tokens

FAMILIES = ["qwen3", "qwen3-tied", "qwen2", "llama"]
EXPERTS_IMPLEMENTATIONS = ["grouped_mm", "batched_mm", "eager"]
CASES = [(family, None) for family in FAMILIES]
CASES += [("qwen3-moe", implementation) for implementation in EXPERTS_IMPLEMENTATIONS]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("family", "experts"), CASES)
def test_forward_uses_rounded_weights_and_backward_goes_straight_through(
    family: str, experts: str | None, device: str
) -> None:
    model, oracle = pair(family, experts)
    assert_same_run(model.to(device), oracle.to(device))


@pytest.mark.parametrize(
    "recipe", [Recipe(scale_policy="amax"), Recipe.ffn(block_scale_method="mse")]
)
def test_recipe_options_reach_the_weights(recipe: Recipe) -> None:
    assert_same_run(*pair("qwen3", recipe=recipe))


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_compiled_layers_follow_the_weights(family: str) -> None:
    model, _ = pair(family)
    oracle = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    for _ in range(2):
        assert_same_run(model, oracle)
        for each in (model, oracle):
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(1.5)


def test_layers_share_compiled_code() -> None:
    model = tiny_model("qwen3", num_hidden_layers=4)
    prepare(model, Recipe())
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        model(input_ids=tokens(), use_cache=False)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_evaluation_uses_the_same_numbers(family: str, mode: type[torch.no_grad]) -> None:
    model, _ = pair(family)
    logits, _ = run(model)
    with mode():
        assert torch.equal(model(input_ids=tokens()).logits, logits)


def test_autocast_rounds_the_bf16_value_of_fp32_weights() -> None:
    model, _ = pair("qwen3")
    masters = tiny_model("qwen3").float()
    prepare(masters, Recipe())
    with torch.autocast("cpu", torch.bfloat16):
        weight = masters.model.layers[0].mlp.up_proj.weight
        x = torch.randn(3, 64, dtype=torch.bfloat16)
        product = nn.functional.linear(x, weight)
    expected = nn.functional.linear(x, model.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(product, expected)


def test_a_copied_layer_holds_no_other_weights() -> None:
    model, oracle = pair("qwen3")
    copied = copy.deepcopy(model.model.layers[0])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(8)
        model.model.layers[1].mlp.up_proj.weight.fill_(torch.nan)
    weight = copied.mlp.up_proj.weight
    expected = oracle.model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight @ torch.eye(64).bfloat16(), expected)
    held = {f"model.layers.0.{name}" for name, p in copied.named_parameters() if p.ndim == 2}
    assert {each.weight_name for each in weight.state.weights.all()} == held
    assert weight.state.weights.all()[0] is copied.self_attn.q_proj.weight


def test_a_weight_copied_alone_is_plain() -> None:
    model, _ = pair("qwen3")
    assert type(copy.deepcopy(model.model.layers[0].mlp.up_proj.weight)) is nn.Parameter


def test_moves_and_casts_stay_prepared() -> None:
    model, _ = pair("qwen3")
    weight = model.float().model.layers[0].mlp.up_proj.weight
    assert isinstance(weight, FakeQuantizedTensor) and weight.dtype == torch.float32


@pytest.mark.parametrize("non_blocking", [False, True], ids=["blocking", "non-blocking"])
def test_a_scale_moves_as_its_weight_does(
    non_blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = pair("qwen3")
    of_scales = []

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not tensor.ndim:
            of_scales.append(kwargs)
        return plain_to(tensor, *args, **kwargs)

    plain_to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", to)
    model.to("meta", non_blocking=non_blocking)
    assert of_scales == [{"non_blocking": non_blocking}] * 14


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_an_offloaded_model_waits_for_no_weight_and_comes_back_equal(family: str) -> None:
    model, oracle = pair(family)
    model.cuda().to("cpu", non_blocking=True)
    weights = [it for it in model.parameters() if isinstance(it, FakeQuantizedTensor)]
    assert all(it.plain().is_pinned() and it.global_scale.is_pinned() for it in weights)
    assert_same_run(model.to("cuda", non_blocking=True), oracle.cuda())


def test_saves_plain_tensors_and_loads_them() -> None:
    model, oracle = pair("qwen3-moe")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    plain = tiny_model("qwen3-moe").state_dict()
    assert {name for name, t in state.items() if not torch.equal(t, plain[name])} == set()
    assert {type(tensor) for tensor in state.values()} == {torch.Tensor}

    other = tiny_model("qwen3-moe", seed=1)
    prepare(other, Recipe())
    other.load_state_dict(state)
    assert_same_run(other, oracle)
