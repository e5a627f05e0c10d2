"""What prepare() leaves as it was, when scales are refreshed, and what it refuses."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from qat_core.planning.recipe import Recipe
from qat_core.training.parameter import FakeQuantizedTensor
from qat_core.training.preparation import is_prepared, prepare
from qat_core.training.state import rounded_weights
from tests.tiny_models import tiny_model, tokens

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "adamw-for-loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
}


@pytest.fixture
def amax_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of groups whenever the real amax computation runs."""
    calls: list[int] = []
    compute = rounded_weights.group_amax

    def counted(groups: Any) -> Any:
        calls.append(len(groups))
        return compute(groups)

    monkeypatch.setattr(rounded_weights, "group_amax", counted)
    return calls


def loss(model: nn.Module) -> torch.Tensor:
    return model(input_ids=tokens(), labels=tokens(), use_cache=False).loss


def test_keeps_names_classes_objects_and_flags() -> None:
    model = tiny_model("qwen3-moe")
    model.model.layers[0].mlp.experts.down_proj.requires_grad_(False)
    before = dict(model.named_parameters())
    flags = {name: p.requires_grad for name, p in before.items()}
    classes = [type(module) for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepare(model, Recipe())
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert {name: p.requires_grad for name, p in after.items()} == flags
    assert [type(module) for module in model.modules()] == classes
    assert all(isinstance(p, nn.Parameter) for p in after.values())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_the_state_of_weights_that_layers_share_is_plain_in_each() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model[1].weight = model[0].weight
    prepare(model, Recipe())
    state = model.state_dict()
    assert {type(tensor) for tensor in state.values()} == {torch.Tensor}
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("made_before", [True, False], ids=["before-prepare", "after-prepare"])
def test_optimizers_step_on_full_precision(name: str, made_before: bool) -> None:
    """The same gradients lead to the same weights as in a model that was not prepared."""
    model, plain = tiny_model("qwen3"), tiny_model("qwen3")
    optimizer = OPTIMIZERS[name](model.parameters()) if made_before else None
    prepare(model, Recipe())
    optimizer = optimizer or OPTIMIZERS[name](model.parameters())
    expected = OPTIMIZERS[name](plain.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss(model).backward()
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            other.grad = parameter.grad.clone()
        optimizer.step()
        expected.step()
    for (key, tensor), other in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, other), key
    kinds = {type(value) for state in optimizer.state.values() for value in state.values()}
    assert kinds <= {torch.Tensor}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_amax_computation_an_optimizer_step(name: str, amax_calls: list[int]) -> None:
    model = tiny_model("qwen3-moe")
    num_groups = len(prepare(model, Recipe()).groups)
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        for _ in range(2):  # micro-batches
            loss(model).backward()
        with torch.no_grad():
            loss(model)
        optimizer.step()
        optimizer.zero_grad()
    loss(model)
    assert amax_calls == [num_groups] * 5  # prepare, first forward, and after each step the next


def test_whole_weights_are_freed_where_shards_replace_them() -> None:
    model = tiny_model("qwen3")
    prepare(model, Recipe())
    projection = model.model.layers[0].mlp.down_proj
    whole = weakref.ref(projection.weight)
    projection._parameters["weight"] = nn.Parameter(torch.empty(0))  # as fully_shard does
    gc.collect()
    assert whole() is None


def spoiled() -> nn.Module:
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return tiny_model("qwen3")


@pytest.mark.parametrize(
    ("make", "recipe", "message"),
    [
        (lambda: tiny_model("qwen3"), Recipe(ignore=("layers",)), "quantizes nothing"),
        (on_meta, Recipe(), r"layers\.0\.self_attn\.q_proj\.weight: is on the meta device"),
        (lambda: tiny_model("qwen3").half(), Recipe(), "needs bfloat16 or float32"),
        (spoiled, Recipe(), r"layers\.1\.mlp\.up_proj\.weight: holds NaN"),
    ],
    ids=["nothing", "meta", "half", "nan"],
)
def test_refuses_and_leaves_the_model_unchanged(
    make: Callable[[], nn.Module], recipe: Recipe, message: str
) -> None:
    model = make()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=message):
        prepare(model, recipe)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert not any(isinstance(p, FakeQuantizedTensor) for p in after.values())
    assert not is_prepared(model)


def test_refuses_weights_on_two_devices() -> None:
    message = r"1\.mlp\.down_proj\.weight: is on meta, model\.layers\.0\.\S+ on cpu"
    model = tiny_model("qwen3")
    model.model.layers[1].mlp.down_proj.to("meta")
    with pytest.raises(ValueError, match=message):
        prepare(model, Recipe(), allow_meta=True)


def test_refuses_weights_that_become_infinite() -> None:
    model = tiny_model("qwen3")
    prepare(model, Recipe())
    with torch.no_grad():
        # finite, but rounds up to infinity
        model.model.layers[0].mlp.down_proj.weight[0, 0] = 3.38e38
    for _ in range(2):
        with pytest.raises(ValueError, match=r"0\.mlp\.down_proj\.weight: holds NaN or infinity"):
            loss(model)


def test_meta_weights_may_be_loaded_later() -> None:
    model, expected = on_meta(), tiny_model("qwen3")
    prepare(model, Recipe(), allow_meta=True)
    prepare(expected, Recipe())
    model.to_empty(device="cpu")
    model.load_state_dict(expected.state_dict())
    model.model.rotary_emb = expected.model.rotary_emb
    assert torch.equal(loss(model), loss(expected))
