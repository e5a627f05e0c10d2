"""Whether weights were finite when they were measured, asked without a wait for the GPU."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qat_core.nvfp4 import is_representable
from qat_core.nvfp4.format import UNREPRESENTABLE
from qat_core.training.state.held_weights import HeldWeights


class Later:
    """Whether `value`, bool and 0-D, is true.

    `bool(value)` waits for all that its CUDA stream was given before it is asked. This waits for
    what the stream was given before it was made: the value is copied to pinned memory at once.
    """

    def __init__(self, value: Tensor) -> None:
        self._value, self._copied = value, None
        if value.is_cuda:
            self._value = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._copied = torch.cuda.current_stream(value.device).record_event()

    def __bool__(self) -> bool:
        """Waits for the copy, if the GPU has not come to it yet."""
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._value)

    def __reduce__(self) -> tuple[type["Later"], tuple[Any, ...]]:
        """Pickles as what is known by then; events cannot."""
        return Later, (torch.tensor(bool(self)),)


class Measured(NamedTuple):
    """What a refresh found of groups that the same ranks share.

    Each has one value, or one for each expert; `finite` holds those of all groups in a row.
    """

    groups: list[tuple[str, ...]]
    sizes: list[int]
    finite: Tensor
    all_finite: Later


class Finiteness:
    """What the last refresh found."""

    def __init__(self) -> None:
        self._measured: list[Measured] = []

    def add(self, groups: list[tuple[str, ...]], sizes: list[int], amax: Tensor) -> None:
        """The largest |w| of some groups, their values in a row."""
        finite = is_representable(amax)
        self._measured.append(Measured(groups, sizes, finite, Later(finite.all())))

    def require(self, weights: HeldWeights) -> None:
        """Refuse weights that held NaN or infinity then, and forget it; waits for its end."""
        measured, self._measured = self._measured, []
        if all(it.all_finite for it in measured):
            return
        bad = [name for it in measured for name in _not_finite(it)]
        now = [n for n in bad if not bool(is_representable(weights.weight(n).plain()).all())]
        culprits = ", ".join(now or bad)
        raise ValueError(f"{culprits}: holds {UNREPRESENTABLE}, which NVFP4 cannot represent")

    @property
    def is_on_gpu(self) -> bool:
        """Whether to ask is to wait for a GPU."""
        return any(it.finite.is_cuda for it in self._measured)

    def clear(self) -> None:
        """Forget what was found."""
        self._measured = []


def _not_finite(measured: Measured) -> list[str]:
    of_groups = zip(measured.groups, torch.split(measured.finite, measured.sizes), strict=True)
    return [name for names, finite in of_groups if not bool(finite.all()) for name in names]
