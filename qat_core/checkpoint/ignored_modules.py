"""Modules that stay in BF16, as config.json lists them: from a plan, and back to one."""

import re
from collections.abc import Collection, Iterator

from torch import Tensor, nn

from qat_core.planning.plan import QuantPlan, plan
from qat_core.planning.quantization_config import is_regex
from qat_core.planning.recipe import REGEX_PREFIX, Recipe
from qat_core.weights.hub_names import HubNames, meta_weights


def ignored_modules(checked: QuantPlan, names: HubNames) -> list[str]:
    """Modules that stay in BF16, under the hub's names; a tied output head too."""
    kept = {entry.name for entry in checked.entries if not entry.quantized}
    modules = {"lm_head"}
    for name, weight in meta_weights(checked):
        if name in kept and isinstance(weight, Tensor) and not names.is_embedding(name):
            modules.update(_modules(name, weight, names))
    return sorted(modules)


def declared_plan(model: nn.Module, names: HubNames, ignored: Collection[str]) -> QuantPlan:
    """The plan behind the list of ignored modules of a quantization_config.

    They have the hub's names, or are `re:` and a regex that matches from their start.
    """
    exact = set(ignored)
    patterns = [re.compile(each.removeprefix(REGEX_PREFIX)) for each in ignored if is_regex(each)]

    def is_ignored(module: str) -> bool:
        return module in exact or any(pattern.match(module) for pattern in patterns)

    left_out = [
        re.escape(name)
        for name, pieces in names.pieces.items()
        if any(is_ignored(piece.name.removesuffix(".weight")) for piece in pieces)
    ]
    pattern = f"{REGEX_PREFIX}(?:{'|'.join(left_out)})$"
    return plan(model, Recipe(ignore=(pattern,) if left_out else ()))


def _modules(name: str, weight: Tensor, names: HubNames) -> Iterator[str]:
    """Modules of the hub that a tensor belongs to, if it is a matrix or experts.

    Experts are named as a whole, and by a pattern for readers of compressed-tensors: vLLM asks for
    `experts.0.gate_proj` and the like, whatever the model's are called.
    """
    first = names.pieces[name][0].name
    if weight.ndim == 3 and weight.shape[1] > 1:  # of a convolution it is 1
        block, below, _ = first.partition(".experts.")
        if not below:  # Granite's experts are two modules of a block
            block = first.removesuffix(".weight").rpartition(".")[0]
        yield f"{block}.experts"
        yield f"{REGEX_PREFIX}{re.escape(block)}\\.experts\\..*"
    if weight.ndim == 2 and first.endswith(".weight"):
        yield first.removesuffix(".weight")
