"""Routes: captured as the model chooses, replayed to the bit, refused where they do not fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from qat_core.planning.recipe import Recipe
from qat_core.planning.structure import expert_blocks
from qat_core.routing import NO_ROUTE, by_block, capture, decoder_layers, replay
from qat_core.training.preparation import prepare
from tests.families import tiny_family
from tests.tiny_models import tiny_model, tokens

# routers by softmax before and after the choice, normalized or not, by sigmoid with a bias, by
# groups, with dense layers before them
FAMILIES = ["olmoe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "granitemoe"]


def routes_of(model: PreTrainedModel) -> Tensor:
    with torch.no_grad(), capture(model) as captured:
        model(input_ids=tokens())
    return captured.routes(num_sequences=2)


def other_experts(routes: Tensor, num_experts: int = 6) -> Tensor:
    """Different experts of every token, and in another order than by weight."""
    return (routes.sort(-1).values + 1) % num_experts


def gradients(model: PreTrainedModel, logits: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.autograd.backward(logits.float().log_softmax(-1)[..., 7].sum())
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recipe", [None, Recipe.full()], ids=["bf16", "qat"])
def test_replay_of_its_own_routes_changes_no_bit(recipe: Recipe | None) -> None:
    model = tiny_model("qwen3-moe")
    if recipe:
        prepare(model, recipe)
    routes = routes_of(model)
    assert routes.shape == (2, 16, 2, 2) and routes.dtype == torch.int16
    exact = model(input_ids=tokens()).logits
    expected = gradients(model, exact)
    with replay(model, by_block(model, routes)):
        logits = model(input_ids=tokens()).logits
    assert torch.equal(logits, exact)
    found = gradients(model, logits)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_replay_to_the_bit(family: str) -> None:
    torch.manual_seed(0)
    model = tiny_family(family).eval()
    routes = routes_of(model)
    with torch.no_grad():
        exact = model(input_ids=tokens()).logits
        with replay(model, by_block(model, routes)):
            assert torch.equal(model(input_ids=tokens()).logits, exact)
        with capture(model) as again, replay(model, by_block(model, other_experts(routes, 8))):
            assert not torch.equal(model(input_ids=tokens()).logits, exact)
    assert torch.equal(again.routes(2), other_experts(routes, 8))


def block_by_hand(block: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """Qwen3's block of experts in FP32: sum over the chosen of softmax weight, normalized, times
    down(silu(gate(x)) * up(x))."""
    x = hidden.flatten(0, 1)
    probabilities = linear(x, block.gate.weight).softmax(-1).gather(-1, ids)
    weights = probabilities / probabilities.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for slot, expert in enumerate(ids[token].tolist()):
            gate, up = linear(x[token], block.experts.gate_up_proj[expert]).chunk(2)
            down = linear(silu(gate) * up, block.experts.down_proj[expert])
            out[token] += weights[token, slot] * down
    return out.view_as(hidden)


def test_other_routes_compute_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs and every gradient, the router's included."""
    model = tiny_model("qwen3-moe").float()
    for name in expert_blocks(model):
        model.get_submodule(name).gate.norm_topk_prob = True
    routes = other_experts(routes_of(model)).long()
    with replay(model, by_block(model, routes)):
        found = model(input_ids=tokens()).logits
    found_gradients = gradients(model, found)
    for layer, name in enumerate(expert_blocks(model)):
        block, ids = model.get_submodule(name), routes[:, :, layer].flatten(0, 1)
        monkeypatch.setattr(
            block, "forward", lambda hidden, b=block, i=ids: block_by_hand(b, hidden, i)
        )
    expected = model(input_ids=tokens()).logits
    # FP32 sums in another order: seen 2e-7 of logits of 0.5
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients(model, expected).items():
        torch.testing.assert_close(found_gradients[name], gradient, rtol=1e-4, atol=1e-5)
        if "gate.weight" in name:
            assert gradient.any(), "the router learns"


def test_rows_without_a_route_are_left_to_the_model() -> None:
    model = tiny_model("qwen3-moe").eval()
    own, none = routes_of(model), torch.full((2, 16, 2, 2), NO_ROUTE)
    routes = other_experts(own)
    routes[0, 4] = NO_ROUTE
    with torch.no_grad():
        exact = model(input_ids=tokens()).logits
        with replay(model, by_block(model, none)):
            assert torch.equal(model(input_ids=tokens()).logits, exact)
        with capture(model) as captured, replay(model, by_block(model, routes)):
            model(input_ids=tokens())
        with replay(model, by_block(model, routes)), capture(model) as would_have:
            model(input_ids=tokens())
    first, own_first = captured.routes(2)[:, :, 0], own[:, :, 0]
    assert torch.equal(first[0, 4], own_first[0, 4])
    assert torch.equal(first[1], routes[1, :, 0])
    assert torch.equal(would_have.routes(2)[:, :, 0], own_first)


def test_a_block_that_is_computed_again_gets_its_own_routes() -> None:
    """As under gradient checkpointing, which runs layers again, the last one first."""
    model = tiny_model("qwen3-moe")
    routes = by_block(model, other_experts(routes_of(model)))
    with replay(model, routes):
        plain = model(input_ids=tokens()).logits
        expected = gradients(model, plain)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        logits = model(input_ids=tokens(), use_cache=False).logits
        assert torch.equal(logits, plain)
        found = gradients(model, logits)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def each(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda routes: {name: change(ids) for name, ids in routes.items()}


def with_first_id(value: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return each(lambda ids: torch.cat([torch.tensor([[value, *ids[0, 1:]]]), ids[1:]]))


UNFIT = {
    "no routes of a block": (
        lambda routes: {"model.layers.0.mlp": routes["model.layers.0.mlp"]},
        "blocks without routes, or unknown: .'model.layers.1.mlp'",
    ),
    "empty": (each(lambda ids: ids[:0]), "layers.0.mlp: no routes"),
    "fewer tokens": (
        each(lambda ids: ids[:-1]),
        r"routes \(tokens, k\) are \(31, 2\), the model's are \(32, 2\)",
    ),
    "another k": (each(lambda ids: ids[:, :1]), r"routes \(tokens, k\) are \(32, 1\)"),
    "unknown expert": (with_first_id(6), "not different experts out of 6"),
    "half a route": (with_first_id(NO_ROUTE), "not different experts out of 6"),
    "an expert twice": (
        each(lambda ids: ids[:, :1].expand(-1, 2)),
        "not different experts out of 6",
    ),
}


@pytest.mark.parametrize(("change", "message"), UNFIT.values(), ids=UNFIT)
def test_routes_that_do_not_fit_are_refused(change: Any, message: str) -> None:
    model = tiny_model("qwen3-moe")
    routes = change(by_block(model, routes_of(model)))
    forward = model.model.layers[0].mlp.forward
    with pytest.raises(ValueError, match=message), replay(model, routes):
        model(input_ids=tokens())
    assert model.model.layers[0].mlp.forward == forward, "the model is as it was"


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="has no experts"), capture(tiny_model("qwen3")):
        pass
    with pytest.raises(ValueError, match="has no experts"), replay(tiny_model("qwen3"), {}):
        pass
    unknown = tiny_family("phimoe")  # chooses by argmax
    with (
        pytest.raises(ValueError, match=r"router is of an unknown kind \(0 calls"),
        capture(unknown),
    ):
        unknown(input_ids=tokens())
    model = tiny_model("qwen3-moe")
    with pytest.raises(ValueError, match="routes of 1 layers for 2"):
        by_block(model, routes_of(model)[:, :, :1])


def test_layers_are_counted_with_dense_ones() -> None:
    assert decoder_layers(tiny_family("deepseek_v3")) == [1]
    assert list(expert_blocks(tiny_family("deepseek_v3")).values()) == [8]
