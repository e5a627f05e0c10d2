"""The arms of a study: what each quantizes in training and in rollouts, and how it is drawn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from qat_core.options import BlockScaleMethod, ScalePolicy
from qat_core.planning.recipe import Recipe

ArmName = Literal["bf16", "nvfp4-noqat", "nvfp4-qat", "nvfp4-qat-ffn"]
# all linear and expert weights, or those outside attention; see qat_core.planning.recipe.Recipe
RecipeName = Literal["full", "ffn"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm; arms differ by more than colour in a figure.

    Attributes:
        train_recipe: fake quantization of the trainer's forward pass; None: BF16.
        rollout_recipe: weights that the rollout engine holds packed; None: BF16.
        label: name in legends and tables.
        color: of its lines, bars and points.
        dashes: line style, as matplotlib takes it.
        marker: of its points.
    """

    train_recipe: RecipeName | None
    rollout_recipe: RecipeName | None
    label: str
    color: str
    dashes: str | tuple[int, tuple[float, ...]]
    marker: str


# Colours after Okabe and Ito 2008, for any colour vision; without colour, dashes and markers tell
# the arms apart.
ARMS: Mapping[ArmName, Arm] = {
    "bf16": Arm(
        train_recipe=None,
        rollout_recipe=None,
        label="BF16",
        color="#8a8a8a",
        dashes="solid",
        marker="o",
    ),
    "nvfp4-noqat": Arm(
        train_recipe=None,
        rollout_recipe="full",
        label="NVFP4, no QAT",
        color="#d55e00",
        dashes=(0, (1, 1)),
        marker="X",
    ),
    "nvfp4-qat": Arm(
        train_recipe="full",
        rollout_recipe="full",
        label="NVFP4 QAT",
        color="#0072b2",
        dashes="solid",
        marker="s",
    ),
    "nvfp4-qat-ffn": Arm(
        train_recipe="ffn",
        rollout_recipe="ffn",
        label="NVFP4 QAT, FFN only",
        color="#009e73",
        dashes=(0, (4, 1.5)),
        marker="^",
    ),
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
