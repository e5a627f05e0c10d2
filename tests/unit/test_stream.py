"""A stream or an export packs as the model trains, finite weights alone, and loses no state."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from qat_core import Recipe, export, prepare, weight_stream
from qat_core.nvfp4 import PackedTensor, fake_quantize, global_scale, is_representable
from qat_core.options import BlockScaleMethod, ScalePolicy
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
        n: tuple(t.reshape(-1).view(torch.uint8).cpu().numpy().tobytes() for t in p)
        for n, p in parts.items()
    }


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


WEIGHTS = {
    "qwen3": "model.layers.1.mlp.up_proj.weight",
    "qwen3-moe": "model.layers.1.mlp.experts.gate_up_proj",
}


# the last is finite in FP32 and rounds to infinity in BF16
@pytest.fixture(params=[float("nan"), float("-inf"), 3.4e38], ids=str)
def bad(request: pytest.FixtureRequest) -> float:
    return float(request.param)


@pytest.fixture(params=["qwen3", "qwen3-moe"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _spoiled(family: str, bad: float, prepared: bool = False) -> nn.Module:
    """An FP32 model, one value of which is bad; prepared before it was."""
    model = tiny_model(family).float()
    if prepared:
        prepare(model, Recipe())
    with torch.no_grad():
        model.get_parameter(WEIGHTS[family]).view(-1)[70] = bad
    return model


@pytest.mark.parametrize("prepared", [False, True], ids=["plain", "prepared"])
def test_a_stream_is_refused_before_its_first_weight(
    family: str, bad: float, prepared: bool
) -> None:
    model = _spoiled(family, bad, prepared)
    with pytest.raises(ValueError, match=f"^{WEIGHTS[family]}: holds NaN or infinity"):
        next(weight_stream(model, plan(model, Recipe()), Recipe()))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
def test_a_stream_from_the_host_to_a_gpu_is_refused_before_its_end(
    family: str, bad: float, packed: bool
) -> None:
    model, recipe = _spoiled(family, bad), Recipe() if packed else None
    stream = weight_stream(model, recipe and plan(model, recipe), recipe, "cuda")
    with pytest.raises(ValueError, match=f"^{WEIGHTS[family]}: holds NaN or infinity"):
        list(stream)


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_a_stream_from_the_host_packs_on_a_gpu_as_on_the_host(family: str, pinned: bool) -> None:
    model = tiny_model(family)
    expected = _bytes(weight_stream(model, plan(model, Recipe()), Recipe()))
    if pinned:  # as after `.to("cpu", non_blocking=True)`, verl's way to offload
        model.cuda().to("cpu", non_blocking=True)
    streamed = _bytes(weight_stream(model, plan(model, Recipe()), Recipe(), "cuda"))
    assert list(streamed) == list(expected)
    assert [name for name in expected if streamed[name] != expected[name]] == []


def test_an_export_is_refused_and_leaves_nothing(family: str, bad: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{WEIGHTS[family]}: holds NaN or infinity"):
        export(_spoiled(family, bad), Recipe(), tmp_path / "packed")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("recipe", [Recipe(), None], ids=["nvfp4", "bf16"])
def test_what_is_not_packed_is_refused_too(name: str, recipe: Recipe | None, bad: float) -> None:
    model = tiny_model("qwen3").float()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[5] = bad
    stream = weight_stream(model, recipe and plan(model, recipe), recipe)
    with pytest.raises(ValueError, match=f"^{name}: holds NaN or infinity"):
        next(stream)


POLICIES, METHODS = ("pow2", "amax"), ("max", "four_over_six", "mse")
# In units of 2**117, which the scale 352 holds without error but for the first, at which it rounds
# up to 2112: so it has the least squared error, and 2112 * 2**117 is no BF16 number.
WORST_BLOCK = [1768.0, *[1408.0] * 7, *[1056.0] * 8]


def largest(multiple: int) -> float:
    return (1 + multiple / 128) * 2.0**127


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("method", METHODS)
def test_every_weight_that_is_accepted_stays_finite(
    policy: ScalePolicy, method: BlockScaleMethod
) -> None:
    torch.manual_seed(0)
    shares = torch.cat([torch.rand(200, 16), torch.linspace(0, 1, 200)[:, None].expand(-1, 16)])
    for multiple in range(128):
        shares[:, 0] = 1
        weight = (shares.double() * largest(multiple)).bfloat16()
        if bool(is_representable(weight).all()):
            scale = global_scale(weight.abs().max().float(), policy)
            assert fake_quantize(weight, scale, method).isfinite().all(), multiple
    assert is_representable(torch.tensor(largest(92)))


def test_the_next_weight_may_round_to_infinity() -> None:
    weight = (torch.tensor([WORST_BLOCK]).double() * 2.0**117).bfloat16()
    assert weight.max() == largest(93) and not is_representable(weight.max())
    scale = global_scale(weight.max().float(), "pow2")
    assert fake_quantize(weight, scale, "mse").isinf().any()
    weight[0, 0] = largest(92)
    scale = global_scale(weight.max().float(), "pow2")
    assert fake_quantize(weight, scale, "mse").isfinite().all()
