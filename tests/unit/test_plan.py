"""Which parameters of a model a recipe quantizes, in which groups, and what it cannot."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError
from torch import nn

from qat_core.planning.explanation import explain
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe, matches
from qat_core.training.preparation import prepare
from qat_core.weights.stream import weight_stream
from tests.tiny_models import tiny_model

ATTENTION_GROUP = "model.layers.0.self_attn.q_proj+k_proj+v_proj"


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied", "qwen2", "llama"])
def test_dense_models_quantize_seven_weights_a_layer_in_four_groups(family: str) -> None:
    found = plan(tiny_model(family), Recipe.full())
    assert len(found.quantized) == 2 * 7
    assert len(found.groups) == 2 * 4
    assert [name.split(".")[-2][0] for name in found.groups[ATTENTION_GROUP]] == ["q", "k", "v"]
    assert sorted(sum(found.groups.values(), ())) == sorted(found.quantized)


def test_moe_quantizes_expert_parameters_but_no_router() -> None:
    found = plan(tiny_model("qwen3-moe"), Recipe.full())
    experts = "model.layers.1.mlp.experts."
    assert {f"{experts}gate_up_proj", f"{experts}down_proj"} <= set(found.quantized)
    assert not [name for name in found.quantized if "mlp.gate." in name or "lm_head" in name]
    assert found.groups[f"{experts}gate_up_proj"] == (f"{experts}gate_up_proj",)


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        ("model", "quantizes nothing"),
        ("q_proj", "q_proj.weight is left out .* ignore all or none"),
        ("experts.down_proj", r"experts\.down_proj is left out .*experts\.gate_up_proj not"),
        ("1.mlp.experts.gate_up", r"1\.mlp\.experts\.gate_up_proj is left out .*down_proj not"),
    ],
)
def test_refuses_what_no_engine_serves(ignore: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(tiny_model("qwen3-moe"), Recipe(ignore=(ignore,)))


class Block(nn.Module):
    """Experts that are modules of their own, beside a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 3, bias=False)
        self.experts = nn.ModuleList(self._expert() for _ in range(3))
        self.shared_expert = self._expert()

    def _expert(self) -> nn.ModuleDict:
        return nn.ModuleDict({name: nn.Linear(32, 32) for name in ("up_proj", "down_proj")})


def test_all_experts_of_a_block_are_one_layer_and_a_shared_one_is_not() -> None:
    model = nn.ModuleDict({"mlp": Block()})
    message = r"experts\.1\.up_proj\.weight is left out .*experts\.0\.up_proj"
    with pytest.raises(ValueError, match=message):
        plan(model, Recipe(ignore=("experts.1",)))
    quantized = plan(model, Recipe(ignore=("shared_expert.down_proj",))).quantized
    assert len(quantized) == 3 * 2 + 1


def test_refuses_input_sizes_that_are_odd_or_differ() -> None:
    model = tiny_model("qwen3")
    mlp = model.model.layers[0].mlp
    mlp.down_proj = nn.Linear(40, 64, bias=False)
    with pytest.raises(ValueError, match=r"0\.mlp\.down_proj\.weight: input size 40 .* ignore"):
        plan(model, Recipe())
    mlp.down_proj = nn.Linear(96, 64, bias=False)
    mlp.up_proj = nn.Linear(32, 96, bias=False)
    with pytest.raises(ValueError, match=r"gate_proj\+up_proj: members differ in input size"):
        plan(model, Recipe())


@pytest.mark.parametrize("checked", [plan, prepare], ids=["plan", "prepare"])
@pytest.mark.parametrize(
    "pattern",
    ["self_atn", "*self_attn*", r"re:model\.layers\.0\.mlp\.experts\.3\..*", "mlp.gate_prj"],
    ids=["misspelt", "wildcard", "one expert of the hub", "more than a router"],
)
def test_an_ignore_pattern_that_matches_nothing_is_refused(checked: Any, pattern: str) -> None:
    message = f"ignore: {re.escape(repr(pattern))} matches nothing in Qwen3MoeForCausalLM: correct"
    with pytest.raises(ValueError, match=message):
        checked(tiny_model("qwen3-moe"), Recipe(ignore=("layers.0.self_attn", pattern)))


def test_patterns_of_what_is_never_quantized_go_with_any_model() -> None:
    """verl's own, of which a dense model with a tied output head has only one."""
    model = tiny_model("qwen3-tied")
    patterns = ("lm_head", "embed_tokens", "re:.*mlp.gate$")
    assert plan(model, Recipe(ignore=patterns)).quantized == plan(model, Recipe()).quantized


def test_of_the_patterns_for_attention_one_is_enough() -> None:
    model = tiny_model("qwen3")
    for layer in model.model.layers:
        layer.mixer = layer._modules.pop("self_attn")  # a name that says nothing
    assert all("mlp" in name for name in plan(model, Recipe.ffn()).quantized)
    with pytest.raises(ValueError, match=r"ignore: 're:\.\*attn\.\*' matches nothing"):
        plan(model, Recipe(ignore=("re:.*attn.*",)))


def stream(model: nn.Module, recipe: Any) -> object:
    return weight_stream(model, plan(model, Recipe()), recipe)


@pytest.mark.parametrize("given", ["full", Recipe.full, {"ignore": ()}, None])
def test_what_is_no_recipe_is_answered_with_the_way_to_write_it(given: Any) -> None:
    for use in (prepare, explain, plan, *([stream] if given else [])):  # None: in BF16
        with pytest.raises(ValueError, match=r"recipe: .*: write Recipe\.full\(\), Recipe\.ffn"):
            use(tiny_model("qwen3"), given)


def test_explains_reasons_and_shared_scales() -> None:
    text = explain(tiny_model("qwen3-moe"), Recipe(ignore=("layers.0.self_attn",)))
    lines = {line.split("  ")[1]: line for line in text.splitlines() if line[0].isdigit()}
    assert "2x" in lines["model.layers.*.mlp.experts.gate_up_proj"]
    assert "NVFP4" in lines["model.layers.*.mlp.experts.gate_up_proj"]
    assert "BF16" in lines["lm_head.weight"]
    assert "one scale for q_proj+k_proj+v_proj" in text
    assert "ignored by 'layers.0.self_attn'" in text


def test_ffn_ignores_attention_and_what_the_caller_adds() -> None:
    recipe = Recipe.ffn(scale_policy="amax", ignore=("layers.0.",))
    assert recipe.scale_policy == "amax"
    ignored = [
        any(matches(pattern, name) for pattern in recipe.ignore)
        for name in ("model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj", "mlp.up_proj")
    ]
    assert ignored == [True, True, False]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("self_attn", "model.layers.0.self_attn.q_proj", True),
        ("re:.*self_attn.*", "model.layers.0.self_attn.q_proj", True),
        ("re:self_attn", "model.layers.0.self_attn.q_proj", False),
        ("re:.*q_proj$", "model.layers.0.self_attn.q_proj", True),
        (".*q_proj", "model.layers.0.self_attn.q_proj", False),
    ],
    ids=["exact", "substring", "regex", "regex-from-start", "regex-end", "no-regex-without-re"],
)
def test_pattern_meaning(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_exact_and_regex_patterns_mean_what_compressed_tensors_means() -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    names = ["lm_head", "model.layers.0.self_attn.q_proj", "model.layers.10.mlp.gate"]
    for pattern in ["lm_head", "re:.*self_attn.*", "re:self_attn", r"re:.*\.1\d\..*", "re:.*gate$"]:
        for name in names:
            assert matches(pattern, name) == match.match_name(name, pattern), (pattern, name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ignore": ("re:(",)}, "re:\\("),
        ({"ignore": ("re:",)}, "empty"),
        ({"ignore": ("",)}, "empty"),
        ({"mode": "w4a4"}, "mode"),
        ({"scale": "pow3"}, "scale"),
        ({"ignored": ()}, "ignored"),
    ],
    ids=["bad-regex", "empty-regex", "empty", "mode", "scale", "unknown-key"],
)
def test_bad_recipes_are_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Recipe(**fields)


@pytest.mark.parametrize("make", [Recipe, Recipe.full, Recipe.ffn])
def test_a_pattern_alone_does_not_come_apart_into_its_letters(make: Callable[..., Recipe]) -> None:
    with pytest.raises(ValidationError, match="ignore"):
        make(ignore="gate")


@pytest.mark.parametrize("name", ["full", "ffn"])
def test_a_name_alone_is_answered_with_the_way_to_write_it(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Recipe\('{name}'\): write Recipe\.full\(\), Recipe\.f"):
        Recipe(name)
