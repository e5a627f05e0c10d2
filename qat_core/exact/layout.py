"""Which rows of a batch are one sequence: padded, packed, or neither."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Sequences of a batch of B times T rows.

    Attributes:
        rows: int64, those that are no padding; None for all.
        starts: int32 (sequences + 1,), where each sequence begins among `rows`.
        longest: tokens of the longest one.
    """

    rows: Tensor | None
    starts: Tensor
    longest: int


class Layouts:
    """Finds the layout of a batch once for all layers: it waits for the GPU.

    And once more in each forward pass of the model, as not every write to a tensor is counted:
    those of collectives and through `.data` are not.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._layout: Layout | None = None

    def forget(self, *_: Any) -> None:
        """Forward pre-hook of the whole model."""
        self._layout = None

    def of(self, mask_BT: Tensor | None, positions: Tensor, shape: torch.Size) -> Layout:
        """Of a batch of shape (B, T).

        Args:
            mask_BT: 1 for tokens, 0 for padding; None if there is none.
            positions: (B, T) or (1, T) within each sequence; where one is not that before it plus
                1, a packed sequence begins.
            shape: (B, T).
        """
        key = (_Content(mask_BT), _Content(positions), shape)
        if self._layout is None or key != self._key:
            self._key, self._layout = key, find_layout(mask_BT, positions, shape)
        return self._layout


class _Content:
    """A tensor as it is now: equal only to the same tensor that was not written since."""

    def __init__(self, tensor: Tensor | None) -> None:
        self._tensor = tensor
        is_counted = tensor is not None and not tensor.is_inference()
        self._version = tensor._version if tensor is not None and is_counted else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Content) or self._tensor is not other._tensor:
            return False
        return self._tensor is None or (
            self._version is not None and self._version == other._version
        )


def find_layout(mask_BT: Tensor | None, positions: Tensor, shape: torch.Size) -> Layout:
    """See `Layouts.of`."""
    if mask_BT is not None:
        rows = mask_BT.flatten().nonzero()[:, 0]
        lengths = mask_BT.long().sum(-1)
    else:
        rows = None
        positions = positions.expand(shape)
        begins = torch.ones(shape, dtype=torch.bool, device=positions.device)
        begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        first = begins.flatten().nonzero()[:, 0]
        lengths = first.diff(append=first.new_tensor([shape.numel()]))
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    starts[1:] = lengths.cumsum(0)
    return Layout(rows, starts, int(lengths.max()))
