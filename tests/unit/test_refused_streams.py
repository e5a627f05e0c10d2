"""What a stream or an export must not do: pack otherwise than the model trains, or lose state."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qat_core import Recipe, export, prepare, weight_stream
from qat_core.nvfp4 import PackedTensor
from qat_core.planning.plan import plan
from qat_core.weights.hub_names import Weight
from qat_core.weights.transfer import PARTS
from tests.tiny_models import tiny_model

Take = Callable[[nn.Module, Recipe, Path], object]
TAKES: dict[str, Take] = {
    "stream": lambda model, recipe, _: weight_stream(model, plan(model, recipe), recipe),
    "export": lambda model, recipe, folder: export(model, recipe, folder / "packed"),
}
OTHERS = {
    "scale policy": (Recipe(scale_policy="amax"), "scale_policy: amax, but .* prepared with pow2"),
    "method": (Recipe(block_scale_method="mse"), "block_scale_method: mse, but .* prepared with"),
}


@pytest.mark.parametrize(("recipe", "message"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
def test_another_recipe_than_trained_is_refused(
    take: Take, recipe: Recipe, message: str, tmp_path: Path
) -> None:
    model = tiny_model("qwen3")
    prepare(model, Recipe())
    with pytest.raises(ValueError, match=message):
        take(model, recipe, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("trained", "asked", "message"),
    [
        (
            Recipe.full(),
            Recipe.ffn(),
            r"k_proj\.weight: would not be packed, but prepare\(\) did",
        ),
        (
            Recipe.ffn(),
            Recipe.full(),
            r"k_proj\.weight: would be packed, but prepare\(\) did not",
        ),
    ],
    ids=["fewer", "more"],
)
def test_another_plan_than_trained_is_refused(trained: Recipe, asked: Recipe, message: str) -> None:
    model = tiny_model("qwen3")
    prepare(model, trained)
    with pytest.raises(ValueError, match=message):
        weight_stream(model, plan(model, asked), asked)


def test_a_prepared_model_may_be_streamed_in_bf16() -> None:
    model = tiny_model("qwen3")
    prepare(model, Recipe())
    streamed = dict(weight_stream(model, None, None))
    expected = tiny_model("qwen3").state_dict()
    assert streamed.keys() == expected.keys()
    assert all(torch.equal(torch.as_tensor(streamed[n]), t) for n, t in expected.items())


@pytest.mark.parametrize("recipe", [Recipe.ffn(), Recipe(scale_policy="amax")])
def test_a_prepared_model_streams_what_it_trains_unless_told_otherwise(recipe: Recipe) -> None:
    model = tiny_model("qwen3")
    assert {type(weight) for _, weight in weight_stream(model)} == {torch.Tensor}
    planned = prepare(model, recipe)
    expected = _bytes(weight_stream(model, planned, recipe))
    for stream in (weight_stream(model), weight_stream(model, planned)):
        assert _bytes(stream) == expected


@pytest.mark.parametrize("prepared", [True, False])
def test_half_of_a_plan_and_its_recipe_is_refused(prepared: bool) -> None:
    model = tiny_model("qwen3")
    planned = prepare(model, Recipe()) if prepared else plan(model, Recipe())
    with pytest.raises(ValueError, match="weight_stream: has a plan but no recipe"):
        weight_stream(model, planned, None)
    with pytest.raises(ValueError, match="weight_stream: has a recipe but no plan"):
        weight_stream(model, None, Recipe())


def _bytes(stream: Iterable[tuple[str, Weight]]) -> dict[str, tuple[bytes, ...]]:
    parts = {
        name: [getattr(w, p) for p in PARTS] if isinstance(w, PackedTensor) else [w]
        for name, w in stream
    }
    return {
        n: tuple(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in p)
        for n, p in parts.items()
    }


@pytest.mark.parametrize(
    "given", ["full", plan(tiny_model("qwen3"), Recipe())], ids=["name", "plan"]
)
def test_what_is_no_recipe_is_answered_with_the_way_to_write_one(given: Any) -> None:
    model = tiny_model("qwen3")
    with pytest.raises(ValueError, match=r"^recipe: .{,40}: write Recipe\.full\(\)"):
        weight_stream(model, plan(model, Recipe()), given)


@pytest.mark.parametrize("prepared", [True, False])
def test_a_weight_that_is_written_while_its_stream_is_read_is_refused(prepared: bool) -> None:
    model = tiny_model("qwen3")
    checked = prepare(model, Recipe()) if prepared else plan(model, Recipe())
    stream = weight_stream(model, checked, Recipe())
    next(stream)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.grad = torch.ones(weight.shape, dtype=weight.dtype)
    torch.optim.SGD([weight], lr=1.0).step()
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp\.up_proj\.weight: written while"):
        list(stream)


def test_a_weight_that_was_untied_since_the_plan_was_made_is_refused() -> None:
    model = tiny_model("qwen3-tied")
    checked = plan(model, Recipe())
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    with pytest.raises(ValueError, match=r"lm_head\.weight: in the model's state but not in"):
        weight_stream(model, checked, Recipe())


def test_state_that_the_plan_does_not_know_is_refused() -> None:
    model = tiny_model("qwen3")
    checked = plan(model, Recipe())
    model.model.layers[0].mlp.register_buffer("scale", torch.ones(1))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.scale: in the model's state but not in"):
        weight_stream(model, checked, Recipe())


def test_a_plan_of_a_larger_model_is_refused() -> None:
    larger = plan(tiny_model("qwen3", num_hidden_layers=3), Recipe())
    message = r"^model\.layers\.2\.input_layernorm\.weight, .*: in the plan but not in the model"
    with pytest.raises(ValueError, match=message):
        weight_stream(tiny_model("qwen3"), larger, Recipe())
