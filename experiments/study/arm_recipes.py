"""The quantization recipes of an arm, with a study's scale policies."""

from typing import NamedTuple

from experiments.study.arms import ARMS, ArmName, RecipeName
from qat_core.nvfp4 import BlockScale, ScalePolicy
from qat_core.recipe import Recipe


class ArmRecipes(NamedTuple):
    """None stands for BF16."""

    train: Recipe | None
    rollout: Recipe | None


def make_recipes(
    arm: ArmName, scale: ScalePolicy = "pow2", block_scale: BlockScale = "max"
) -> ArmRecipes:
    """The recipes of an arm."""

    def make(name: RecipeName | None) -> Recipe | None:
        if name is None:
            return None
        recipe = Recipe.full if name == "full" else Recipe.ffn
        return recipe(scale=scale, block_scale=block_scale)

    return ArmRecipes(make(ARMS[arm].train_recipe), make(ARMS[arm].rollout_recipe))
