"""Weight streams for transports that know named tensors only, such as verl's buckets.

A packed weight travels as three tensors. The first tensor of a stream announces all weights, so
that the receiver can refuse them before it has replaced anything.
"""

import json
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from qat_core.checkpoint.hub import Weight
from qat_core.nvfp4 import PackedTensor
from qat_core.plan import QuantPlan

ANNOUNCEMENT = "qat_core:announcement"
PARTS = ("codes", "block_scale", "global_scale")


def to_wire(plan: QuantPlan, stream: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Tensor]]:
    """Named tensors of a stream, after the announcement of its weights."""
    announced = json.dumps([[e.name, e.shape, e.quantized] for e in plan.entries]).encode()
    yield ANNOUNCEMENT, torch.frombuffer(bytearray(announced), dtype=torch.uint8)
    for name, weight in stream:
        if isinstance(weight, PackedTensor):
            yield from ((f"{name}:{part}", getattr(weight, part)) for part in PARTS)
        else:
            yield name, weight


def read_announcement(tensor: Tensor) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Shape of each announced weight and whether it comes packed, by name."""
    rows = json.loads(bytes(tensor.cpu().tolist()))
    return {name: (tuple(shape), packed) for name, shape, packed in rows}


class Assembler:
    """Puts packed weights together again, however their parts are cut into buckets."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, Tensor]] = {}

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Weight]]:
        """The weights that these tensors complete; copies, as buckets are used again."""
        for wire_name, tensor in tensors:
            name, _, part = wire_name.partition(":")
            if not part:
                yield name, tensor.clone()
                continue
            parts = self._parts.setdefault(name, {})
            parts[part] = tensor.clone()
            if len(parts) == len(PARTS):
                yield name, PackedTensor(**self._parts.pop(name))

    def require_complete(self) -> None:
        """ValueError that names a weight of which not all parts came."""
        if self._parts:
            raise ValueError(f"weight sync: {next(iter(self._parts))} came without all its parts")
