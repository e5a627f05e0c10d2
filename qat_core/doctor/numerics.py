"""Variants of RMSNorm and of rotary embeddings that engines and trainers disagree on.

`trainer` is what the trainer's model class computes: transformers rounds the normalized value to
BF16 before it multiplies with the weight, and rotates in BF16. `fp32` rounds once, at the end.
`bf16` rounds the variance or the frequencies of the rotation too, which is a bug.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

VARIANTS = ("trainer", "fp32", "bf16")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROTATION = "apply_rotary_pos_emb"


@contextmanager
def variant(model: nn.Module, norm: str, rope: str) -> Iterator[None]:
    """Inside, the model's norms and rotary embeddings compute the named variants."""
    with ExitStack() as patches:
        if norm != "trainer":
            for module in norms(model):
                forward = partial(_norm, module, _DTYPES[norm])
                patches.enter_context(patch.object(module, "forward", forward))
        if rope == "fp32":
            owner = sys.modules[type(model).__module__]
            rotate = partial(_rotate_in_fp32, getattr(owner, ROTATION))
            patches.enter_context(patch.object(owner, ROTATION, rotate))
        if rope == "bf16":
            for name, frequencies in model.named_buffers():
                if name.endswith("inv_freq"):  # of rotary embeddings, FP32
                    patches.callback(frequencies.copy_, frequencies.clone())
                    frequencies.copy_(frequencies.bfloat16())
        yield


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """Inside, a BF16 model computes in FP32 with the same numbers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()


def norms(model: nn.Module) -> list[Any]:
    """The RMSNorm modules, by the name of their class."""
    return [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]


def _norm(module: Any, dtype: torch.dtype, x: Tensor) -> Tensor:
    inner = x.to(dtype)
    scale = torch.rsqrt((inner * inner).mean(-1, keepdim=True) + module.variance_epsilon)
    normalized: Tensor = inner * scale * module.weight.to(dtype)
    return normalized.to(x.dtype)


def _rotate_in_fp32(
    rotate: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    wide = [a.float() if isinstance(a, Tensor) else a for a in args]
    wide_kwargs = {n: a.float() if isinstance(a, Tensor) else a for n, a in kwargs.items()}
    q_rotated, k_rotated = rotate(q.float(), k.float(), *wide, **wide_kwargs)
    return q_rotated.to(q.dtype), k_rotated.to(k.dtype)
