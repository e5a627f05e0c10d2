from collections.abc import Callable

import pytest
from pydantic import ValidationError

from qat_core.planning.recipe import Recipe, matches


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
