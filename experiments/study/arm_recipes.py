"""The quantization recipes of an arm, with a study's scale policies."""

from typing import NamedTuple

from experiments.study.arms import ARMS, ArmName, RecipeName
from qat_core.options import BlockScaleMethod, ScalePolicy
from qat_core.recipe import Recipe


class ArmRecipes(NamedTuple):
    """None stands for BF16."""

    train: Recipe | None
    rollout: Recipe | None


def make_recipe(
    name: RecipeName, scale_policy: ScalePolicy, block_scale_method: BlockScaleMethod
) -> Recipe:
    """The recipe of that name."""
    make = Recipe.full if name == "full" else Recipe.ffn
    return make(scale_policy=scale_policy, block_scale_method=block_scale_method)


def make_recipes(
    arm: ArmName, scale_policy: ScalePolicy = "pow2", block_scale_method: BlockScaleMethod = "max"
) -> ArmRecipes:
    """The recipes of an arm."""
    train, rollout = (
        make_recipe(name, scale_policy, block_scale_method) if name else None
        for name in (ARMS[arm].train_recipe, ARMS[arm].rollout_recipe)
    )
    return ArmRecipes(train, rollout)
