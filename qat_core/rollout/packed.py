"""What travels from the trainer to a rollout engine: BF16 tensors and packed NVFP4 weights."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qat_core.nvfp4 import PackedTensor, global_scale, group_amax, quantize
from qat_core.parameter import FakeQuantizedTensor
from qat_core.plan import QuantPlan
from qat_core.recipe import Recipe


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
    """
    weights = {name: _full_precision(p) for name, p in model.named_parameters()}
    scales = {} if plan is None or recipe is None else _global_scales(weights, plan, recipe)
    for name, weight in weights.items():
        if recipe is not None and name in scales:
            yield name, quantize(weight, scales[name], recipe.block_scale)
        else:
            yield name, weight.to(torch.bfloat16)


def _full_precision(parameter: nn.Parameter) -> Tensor:
    """The parameter's own values, of which a prepared one shows the rounding in products."""
    tensor = parameter.detach()
    return tensor.plain() if isinstance(tensor, FakeQuantizedTensor) else tensor


def _global_scales(
    weights: dict[str, Tensor], plan: QuantPlan, recipe: Recipe
) -> dict[str, Tensor]:
    """The global scale of every packed weight; members of a fused group share theirs."""
    groups = list(plan.groups.values())
    amaxes = group_amax([[weights[name] for name in group] for group in groups])
    return {
        name: global_scale(amax, recipe.scale)
        for group, amax in zip(groups, amaxes, strict=True)
        for name in group
    }
