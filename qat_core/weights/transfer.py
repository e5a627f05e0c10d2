"""Weight streams for transports that know named tensors only, such as verl's buckets.

A packed weight travels as three tensors. The first tensor of a stream holds its plan: the receiver
can refuse another recipe before it has replaced anything, and knows when all weights have come.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple
from itertools import chain

import torch
from torch import Tensor

from qat_core.nvfp4 import PackedTensor
from qat_core.planning.plan import Entry, QuantPlan
from qat_core.weights.hub_names import Weight, require_copy

PLAN_NAME = "qat_core:plan"
PADDING_NAME = "qat_core:padding"
ALIGNMENT = 4  # bytes, of the widest dtype that travels
PARTS = ("codes", "block_scale", "global_scale")
FIX = "stream every weight of the model once, as planned"


def transfer_tensors(
    plan: QuantPlan, stream: Iterable[tuple[str, Weight]]
) -> Iterator[tuple[str, Tensor]]:
    """Named tensors of a stream, after its plan.

    verl's nccl and nixl transports put tensor after tensor into a buffer and read each one as its
    own dtype, which needs an offset that this dtype divides: after odd sizes comes padding.
    """
    rows = json.dumps([astuple(entry) for entry in plan.entries]).encode()
    tensors = chain(
        [(PLAN_NAME, torch.frombuffer(bytearray(rows), dtype=torch.uint8))],
        (item for name, weight in stream for item in _parts(name, weight)),
    )
    for name, tensor in tensors:
        yield name, tensor
        if missing := -tensor.nbytes % ALIGNMENT:
            yield f"{PADDING_NAME}:{name}", tensor.new_zeros(missing, dtype=torch.uint8)


def _parts(name: str, weight: Weight) -> list[tuple[str, Tensor]]:
    if isinstance(weight, PackedTensor):
        return [(f"{name}:{part}", getattr(weight, part)) for part in PARTS]
    return [(name, weight)]


def read_plan(tensor: Tensor) -> QuantPlan:
    """The plan behind a stream."""
    rows = json.loads(bytes(tensor.cpu().tolist()))
    return QuantPlan(tuple(Entry(name, tuple(shape), *rest) for name, shape, *rest in rows))


class ExpectedWeights:
    """Weights that are expected and have not come yet; looks at names, shapes and dtypes only.

    Args:
        expected: what the weights look like, on any device.
    """

    def __init__(self, expected: Mapping[str, Weight]) -> None:
        self._missing = dict(expected)

    def checked(self, stream: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """The same weights, or some of them in each of several calls.

        Raises:
            ValueError: one was not expected, has come before, or is of another shape or precision.
        """
        for name, weight in stream:
            expected = self._missing.pop(name, None)
            if expected is None:
                raise ValueError(f"weight sync: {name} was not expected or came before: {FIX}")
            if _kind(weight) != _kind(expected):
                raise ValueError(
                    f"weight sync: {name} came as {_show(weight)}, not as {_show(expected)}: {FIX}"
                )
            yield name, weight

    def require_none(self) -> None:
        """ValueError that names weights which have not come."""
        if self._missing:
            some = ", ".join(list(self._missing)[:3])
            raise ValueError(f"weight sync: {len(self._missing)} weights missing: {some}: {FIX}")


def _kind(weight: Weight) -> list[tuple[torch.dtype, torch.Size]]:
    return [(tensor.dtype, tensor.shape) for _, tensor in _parts("", weight)]


def _show(weight: Weight) -> str:
    return " + ".join(f"{dtype} {tuple(shape)}" for dtype, shape in _kind(weight))


class TiedCopies:
    """Leaves out what a stream without a plan brings once more under another name.

    Args:
        tied: second names of tied weights, each with the first.
    """

    def __init__(self, tied: Mapping[str, str]) -> None:
        self._tied = tied
        self._came: dict[str, Tensor] = {}

    def left_out(self, stream: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """The same weights less second names, or some of them in each of several calls.

        ValueError for one with other values than the first, which no engine would read.
        """
        for name, weight in stream:
            if name in self._tied or name in self._tied.values():
                assert isinstance(weight, Tensor)
                self._came[name] = weight
                for second, first in self._tied.items():
                    if second in self._came and first in self._came:
                        copy, original = self._came.pop(second), self._came[first]
                        require_copy(copy, original, second, first, "weight sync")
            if name not in self._tied:
                yield name, weight


class Assembler:
    """Puts packed weights together again, however their parts are cut into buckets."""

    def __init__(self) -> None:
        self._came: set[str] = set()
        self._parts: dict[str, dict[str, Tensor]] = {}

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Weight]]:
        """The weights that these tensors complete; copies, as buckets are used again."""
        for full_name, tensor in tensors:
            if full_name.startswith(PADDING_NAME):
                continue
            if full_name in self._came:
                raise ValueError(f"weight sync: {full_name} came before: {FIX}")
            self._came.add(full_name)
            name, _, part = full_name.partition(":")
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
