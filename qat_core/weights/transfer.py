"""Weight streams for transports that know named tensors only, such as verl's buckets.

A packed weight travels as three tensors. The first tensor of a stream announces all weights: the
receiver can refuse another recipe before it has replaced anything, and knows when all have come.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple

import torch
from torch import Tensor

from qat_core.nvfp4 import PackedTensor
from qat_core.plan import Entry, QuantPlan
from qat_core.weights.hub_names import Weight

ANNOUNCEMENT = "qat_core:announcement"
PARTS = ("codes", "block_scale", "global_scale")
MEND = "stream every weight of the model once, as planned"


def to_wire(plan: QuantPlan, stream: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Tensor]]:
    """Named tensors of a stream, after the announcement of its weights."""
    announced = json.dumps([astuple(entry) for entry in plan.entries]).encode()
    yield ANNOUNCEMENT, torch.frombuffer(bytearray(announced), dtype=torch.uint8)
    for name, weight in stream:
        if isinstance(weight, PackedTensor):
            yield from ((f"{name}:{part}", getattr(weight, part)) for part in PARTS)
        else:
            yield name, weight


def read_announcement(tensor: Tensor) -> QuantPlan:
    """The plan behind a stream."""
    rows = json.loads(bytes(tensor.cpu().tolist()))
    return QuantPlan(tuple(Entry(name, tuple(shape), *rest) for name, shape, *rest in rows))


class AwaitedWeights:
    """What a stream has announced and not yet brought; looks at names, shapes and dtypes only.

    Args:
        announced: what the weights look like, on any device.
    """

    def __init__(self, announced: Mapping[str, Weight]) -> None:
        self._missing = dict(announced)

    def checked(self, stream: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """The same weights, or some of them in each of several calls.

        Raises:
            ValueError: one was not announced, has come before, or is of another shape or precision.
        """
        for name, weight in stream:
            awaited = self._missing.pop(name, None)
            if awaited is None:
                raise ValueError(f"weight sync: {name} was not announced or came before: {MEND}")
            came, planned = _looks(weight), _looks(awaited)
            if came != planned:
                raise ValueError(f"weight sync: {name} came as {came}, not as {planned}: {MEND}")
            yield name, weight

    def require_none(self) -> None:
        """ValueError that names weights which have not come."""
        if self._missing:
            some = ", ".join(list(self._missing)[:3])
            raise ValueError(f"weight sync: {len(self._missing)} weights missing: {some}: {MEND}")


def _looks(weight: Weight) -> str:
    tensors = [getattr(weight, p) for p in PARTS] if isinstance(weight, PackedTensor) else [weight]
    return " + ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)


class Assembler:
    """Puts packed weights together again, however their parts are cut into buckets."""

    def __init__(self) -> None:
        self._came: set[str] = set()
        self._parts: dict[str, dict[str, Tensor]] = {}

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Weight]]:
        """The weights that these tensors complete; copies, as buckets are used again.

        Raises:
            ValueError: a tensor has come before.
        """
        for wire_name, tensor in tensors:
            if wire_name in self._came:
                raise ValueError(f"weight sync: {wire_name} came before: {MEND}")
            self._came.add(wire_name)
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
