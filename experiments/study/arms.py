"""The arms of a study: what each quantizes in training and in rollouts."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from qat_core.options import BlockScaleMethod, ScalePolicy
from qat_core.planning.recipe import Recipe

ArmName = Literal[
    "bf16", "nvfp4-noqat", "nvfp4-qat", "nvfp4-qat-ffn", "bf16-exact", "nvfp4-qat-exact"
]
# all linear and expert weights, or those outside attention; see qat_core.planning.recipe.Recipe
RecipeName = Literal["full", "ffn"]


class Arm(NamedTuple):
    """What is rounded to NVFP4; None: BF16."""

    train_recipe: RecipeName | None  # fake quantization of the trainer's forward pass
    rollout_recipe: RecipeName | None  # weights that the rollout engine holds packed
    is_exact: bool = False  # training computes the bits of vLLM's rollouts


ARMS: Mapping[ArmName, Arm] = {
    "bf16": Arm(train_recipe=None, rollout_recipe=None),
    "nvfp4-noqat": Arm(train_recipe=None, rollout_recipe="full"),
    "nvfp4-qat": Arm(train_recipe="full", rollout_recipe="full"),
    "nvfp4-qat-ffn": Arm(train_recipe="ffn", rollout_recipe="ffn"),
    "bf16-exact": Arm(train_recipe=None, rollout_recipe=None, is_exact=True),
    "nvfp4-qat-exact": Arm(train_recipe="full", rollout_recipe="full", is_exact=True),
}
assert tuple(ARMS) == get_args(ArmName)


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
