"""Which modules a quantization_config leaves in BF16, and the plan behind such a list."""

import re

from torch import nn

from qat_core.plan import QuantPlan, plan, unchecked_plan
from qat_core.recipe import Recipe
from qat_core.weights.hub_names import fused_module, meta_weights, split_experts


def ignored_modules(checked: QuantPlan) -> list[str]:
    """Linear modules that stay in BF16, under the hub's names; a tied output head too."""
    kept = {entry.name for entry in checked.entries if not entry.quantized}
    matrices = [
        name.removesuffix(".weight")
        for name, weight in split_experts(
            (name, weight) for name, weight in meta_weights(checked) if name in kept
        )
        if len(weight.shape) == 2 and "embed" not in name
    ]
    return sorted({*matrices, "lm_head"})


def declared_plan(model: nn.Module, ignored: list[str]) -> QuantPlan:
    """The plan behind a list of ignored modules, as found in a quantization_config."""
    patterns = {f"re:{re.escape(fused_module(name))}$" for name in ignored if ":" not in name}
    patterns |= {name for name in ignored if name.startswith("re:")}
    return plan(model, Recipe.full(ignore=tuple(sorted(patterns))))


def bf16_plan(model: nn.Module) -> QuantPlan:
    """The plan that quantizes nothing."""
    return unchecked_plan(model, Recipe.full(ignore=("re:.*",)))
