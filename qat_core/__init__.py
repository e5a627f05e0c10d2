"""NVFP4 quantization-aware training for LLM reinforcement learning.

    from qat_core import Recipe, VllmEngine, explain, prepare, weight_stream

    print(explain(model, Recipe()))  # what would be quantized, and what not
    plan = prepare(model, Recipe())  # trains fake-quantized from now on
    engine = VllmEngine(folder, plan)  # the checkpoint that the model was loaded from
    engine.sync(weight_stream(model), plan)  # the same weights, packed

`convert`, `export` and `verify` are for packed checkpoints. Names are loaded when they are first
used: importing this package, or `Recipe`, imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qat_core.checkpoint.read import verify as verify
    from qat_core.checkpoint.write import convert as convert
    from qat_core.checkpoint.write import export as export
    from qat_core.planning.explanation import explain as explain
    from qat_core.planning.recipe import Recipe as Recipe
    from qat_core.rollout.eager import EagerEngine as EagerEngine
    from qat_core.rollout.vllm.engine import VllmEngine as VllmEngine
    from qat_core.training.preparation import is_prepared as is_prepared
    from qat_core.training.preparation import prepare as prepare
    from qat_core.weights.stream import weight_stream as weight_stream

_MODULES = {
    "EagerEngine": "qat_core.rollout.eager",
    "Recipe": "qat_core.planning.recipe",
    "VllmEngine": "qat_core.rollout.vllm.engine",
    "convert": "qat_core.checkpoint.write",
    "explain": "qat_core.planning.explanation",
    "export": "qat_core.checkpoint.write",
    "is_prepared": "qat_core.training.preparation",
    "prepare": "qat_core.training.preparation",
    "verify": "qat_core.checkpoint.read",
    "weight_stream": "qat_core.weights.stream",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
