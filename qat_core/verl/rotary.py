"""Rotary embeddings of verl's models in the precision in which the model and vLLM have them.

verl 0.9.1 ends the making of a model with `module.to(model_dtype)`, which in BF16 also rounds the
frequencies of the rotary embedding, a buffer in FP32: the actor then computes other log-probs than
vLLM. Unneeded once verl casts parameters alone.
"""

from functools import wraps
from typing import Any

from torch import nn
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

_build_module = FSDPEngine._build_module
_to = nn.Module.to


def _to_but_buffers(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """As `nn.Module.to`, but buffers that no checkpoint holds keep their dtype."""
    own = [
        (owner, name, owner._buffers[name])
        for owner in module.modules()
        for name in owner._non_persistent_buffers_set
    ]
    _to(module, *args, **kwargs)
    for owner, name, buffer in own:
        moved = owner._buffers[name]
        if buffer is not None and moved is not None:
            owner._buffers[name] = buffer.to(moved.device)
    return module


@wraps(_build_module)
def _build_with_own_buffers(engine: Any) -> Any:
    nn.Module.to = _to_but_buffers  # type: ignore[method-assign, assignment]
    try:
        return _build_module(engine)
    finally:
        nn.Module.to = _to  # type: ignore[method-assign]


FSDPEngine._build_module = _build_with_own_buffers
