"""What travels from the trainer to a rollout engine: BF16 tensors and packed NVFP4 weights."""

from collections.abc import Iterator

from torch import Tensor, nn

from qat_core.nvfp4 import PackedTensor
from qat_core.plan import QuantPlan
from qat_core.recipe import Recipe
from qat_core.weights.declared import bf16_plan
from qat_core.weights.source import packed_weights


def weight_stream(
    model: nn.Module, plan: QuantPlan | None, recipe: Recipe | None
) -> Iterator[tuple[str, Tensor | PackedTensor]]:
    """All parameters by name, those that the plan quantizes packed, the others in BF16.

    Global scales come from the BF16 values of the weights as they are now, by the rule that the
    fake quantization of training uses, so a prepared model streams the very numbers it trains with.

    Args:
        model: the trained model, prepared or not.
        plan: what to pack, from `qat_core.prepare.plan`; None packs nothing.
        recipe: scale policies; given exactly if plan is.

    Raises:
        ValueError: before the first weight, naming one to be packed that is not finite in BF16.
    """
    if plan is None or recipe is None:
        plan, recipe = bf16_plan(model), Recipe.full()
    return packed_weights(plan, recipe, model.state_dict().__getitem__, resident=True)
