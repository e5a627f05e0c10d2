"""NVFP4 quantization-aware training for LLM reinforcement learning.

    from qat_core import Recipe, explain, prepare, weight_stream

    print(explain(model, Recipe()))  # what would be quantized, and what not
    plan = prepare(model, Recipe())  # trains fake-quantized from now on
    engine.sync(weight_stream(model), plan)  # the same weights, packed

Names are loaded when they are first used: importing this package, or `Recipe`, imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qat_core.planning.explanation import explain
    from qat_core.planning.recipe import Recipe
    from qat_core.training.preparation import is_prepared, prepare
    from qat_core.weights.stream import weight_stream

__all__ = ["Recipe", "explain", "is_prepared", "prepare", "weight_stream"]

_MODULES = {
    "Recipe": "qat_core.planning.recipe",
    "explain": "qat_core.planning.explanation",
    "is_prepared": "qat_core.training.preparation",
    "prepare": "qat_core.training.preparation",
    "weight_stream": "qat_core.weights.stream",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
