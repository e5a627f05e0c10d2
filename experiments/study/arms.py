"""The arms of a study: what precision the trainer's forward pass and the rollout engine use."""

from dataclasses import dataclass

from experiments.study.schema import ARM_NAMES, ArmName
from qat_core.nvfp4 import BlockScale, ScalePolicy
from qat_core.recipe import Recipe


@dataclass(frozen=True)
class Arm:
    """One arm. None stands for BF16.

    Attributes:
        trained: recipe of the trainer's fake quantization.
        rolled_out: recipe of the rollout engine's packed weights.
    """

    trained: Recipe | None
    rolled_out: Recipe | None


def make_arm(name: ArmName, scale: ScalePolicy = "pow2", block_scale: BlockScale = "max") -> Arm:
    """The arm of that name (one of `ARM_NAMES`) with the study's scale policies."""
    full = Recipe.full(scale=scale, block_scale=block_scale)
    ffn = Recipe.ffn(scale=scale, block_scale=block_scale)
    arms = {
        "bf16": Arm(trained=None, rolled_out=None),
        "nvfp4-noqat": Arm(trained=None, rolled_out=full),
        "nvfp4-qat": Arm(trained=full, rolled_out=full),
        "nvfp4-qat-ffn": Arm(trained=ffn, rolled_out=ffn),
    }
    assert tuple(arms) == ARM_NAMES
    return arms[name]
