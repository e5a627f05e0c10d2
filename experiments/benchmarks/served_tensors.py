"""What vLLM serves, tensor by tensor, to tell two engines apart without asking them for answers."""

from collections.abc import Mapping
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
from torch import Tensor

# Scales of an FP8 KV cache, and of activations, which W4A16 does not round: nothing reads them, no
# checkpoint of ours has them, and an engine that begins without weights fills them at random.
OF_ATTENTION = {"_q_scale", "_k_scale", "_v_scale", "_prob_scale", "q_scale", "k_scale", "v_scale"}
OF_ACTIVATIONS = "input_"


def digests(worker: Any) -> dict[str, str]:
    """SHA-256 of the bytes of each parameter and buffer of vLLM's model; runs in its worker."""
    model = worker.model_runner.get_model()
    held = chain(model.named_parameters(), model.named_buffers())
    return {name: _digest(tensor) for name, tensor in held if _is_read(name.rpartition(".")[2])}


def differing(some: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Names of the tensors that differ or are in one engine alone."""
    names = sorted(some.keys() | others.keys())
    return [name for name in names if some.get(name) != others.get(name)]


def writes_in_place(worker: Any) -> bool:
    """Whether the last sync went past vLLM's reload; runs in its worker."""
    return bool(getattr(worker, "qat_core_targets", {}))


def _is_read(leaf: str) -> bool:
    return leaf not in OF_ATTENTION and OF_ACTIVATIONS not in leaf


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return sha256(values.numpy().tobytes()).hexdigest()
