"""What is quantized and how: the recipe, and the meaning of its ignore patterns."""

import re
import reprlib
from collections.abc import Collection
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, field_validator

from qat_core.options import BlockScaleMethod, ScalePolicy

REGEX_PREFIX = "re:"
ROLE_PREFIX = "role:"
ROLES = ("attention",)
# By name as verl has it, and by class: Falcon, BLOOM and GPT-NeoX name theirs otherwise.
ATTENTION_PATTERNS = (r"re:.*attn.*", "role:attention")
# What no recipe quantizes, and what one can: patterns for the former alone go with any model.
_LAYER = "model.layers.0"
_KEPT = (
    *("lm_head", "model.embed_tokens", f"{_LAYER}.mlp.gate"),
    *(f"{_LAYER}.mlp.router", f"{_LAYER}.mlp.shared_expert_gate"),
)
_QUANTIZED = (
    *(f"{_LAYER}.self_attn.q_proj", f"{_LAYER}.mlp.gate_proj"),
    *(f"{_LAYER}.mlp.experts.0.gate_proj", f"{_LAYER}.mlp.shared_expert.gate_proj"),
)
WAYS = "write Recipe.full(), Recipe.ffn() or Recipe(ignore=(...))"


class Recipe(BaseModel):
    """NVFP4 recipe for all linear and expert weights that no pattern ignores.

    Output head, embeddings and router gates are always left out.

    Attributes:
        mode: "w4a16", 4-bit weights and 16-bit activations.
        scale_policy: rule of the global scale of a matrix: "pow2", the largest power of two that
            fits, or "amax", 2688 times the reciprocal of the largest absolute weight.
        block_scale_method: how the scale of 16 weights is chosen: "max", from the largest of them,
            or searched for the least squared error: "four_over_six" of two, "mse" of neighbours.
        ignore: modules left in BF16: a part of their name; `re:` and a regex that matches from the
            name's start, as in compressed-tensors; or `role:attention`, which is attention, and
            what takes its place in hybrid models, by the classes around a module.

    Raises:
        ValueError: an unknown field, or a pattern that is none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["w4a16"] = "w4a16"
    scale_policy: ScalePolicy = "pow2"
    block_scale_method: BlockScaleMethod = "max"
    ignore: tuple[str, ...] = ()

    def __new__(cls, *names: Any, **settings: Any) -> Self:
        """ValueError for `Recipe("full")`, and the like."""
        if names:
            raise ValueError(f"Recipe({names[0]!r}): {WAYS}")
        return super().__new__(cls)

    @field_validator("ignore")
    @classmethod
    def _patterns_compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            _check_pattern(pattern)
        return patterns

    @classmethod
    def full(cls, **overrides: Any) -> "Recipe":
        """Quantize attention and feed-forward weights."""
        return cls(**overrides)

    @classmethod
    def ffn(cls, **overrides: Any) -> "Recipe":
        """Quantize feed-forward and expert weights, leave attention in BF16."""
        own = cls(**overrides).ignore  # checked: a text would come apart into its letters
        return cls(**overrides | {"ignore": (*ATTENTION_PATTERNS, *own)})


def matches(pattern: str, module_name: str, roles: Collection[str] = ()) -> bool:
    """Whether an ignore pattern covers a module of this name that is part of these roles.

    A pattern is `re:` and a regex of the name from its start, `role:` and a role, or a part of the
    name.
    """
    if pattern.startswith(REGEX_PREFIX):
        return re.match(pattern.removeprefix(REGEX_PREFIX), module_name) is not None
    if pattern.startswith(ROLE_PREFIX):
        return pattern.removeprefix(ROLE_PREFIX) in roles
    return pattern in module_name


def require_recipe(given: object) -> None:
    """ValueError for a recipe's name, settings or method in place of a recipe."""
    if not isinstance(given, Recipe):
        raise ValueError(f"recipe: {reprlib.repr(given)}: {WAYS}")


def goes_with_any_model(pattern: str) -> bool:
    """Whether it is no mistake where it matches nothing: it only names what is never quantized."""
    return any(matches(pattern, name) for name in _KEPT) and not any(
        matches(pattern, name) for name in _QUANTIZED
    )


def _check_pattern(pattern: str) -> None:
    if not pattern.removeprefix(REGEX_PREFIX):
        raise ValueError(f"ignore: pattern {pattern!r} is empty and would match every module")
    if pattern.startswith(ROLE_PREFIX) and pattern.removeprefix(ROLE_PREFIX) not in ROLES:
        raise ValueError(f"ignore: {pattern!r}: the roles are {', '.join(ROLES)}")
    if pattern.startswith(REGEX_PREFIX):
        try:
            re.compile(pattern.removeprefix(REGEX_PREFIX))
        except re.error as error:
            raise ValueError(f"ignore: {pattern!r} is not a regular expression: {error}") from error
