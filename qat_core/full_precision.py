"""What code that reaches for a tensor's memory finds in a weight: the full-precision values.

A wrapper tensor has no memory of its own: PyTorch's methods would give null pointers, or change the
wrapper alone. `untyped_storage()` is the wrapper's own, which PyTorch's compiler needs, and empty:
a tensor made of it has no elements. One made of it with sizes given (`set_(storage, 0, sizes)`)
ends the process when it is read: take the storage of an entry of the state dict.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor


class FullPrecisionMemory(torch.Tensor):
    """A wrapper tensor that shows the memory of `_data`."""

    _data: Tensor

    @abstractmethod
    def _assign(self, value: Tensor) -> None:
        """Take over the memory of `value`."""

    @abstractmethod
    def _mark_assigned(self) -> None:
        """From now on the memory may be written by others."""

    @property
    def data(self) -> Tensor:
        """As PyTorch's: the same memory, detached. Assigning gives the weight other memory."""
        detached: Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return detached

    @data.setter
    def data(self, value: Tensor) -> None:
        self._assign(value)

    def data_ptr(self) -> int:
        """Address of the full-precision values; the wrapper has no memory."""
        return self._data.data_ptr()

    def share_memory_(self) -> "FullPrecisionMemory":
        """As PyTorch's: from now on, other processes may write the full-precision values."""
        self._data.share_memory_()  # type: ignore[no-untyped-call]
        self._mark_assigned()
        return self

    def is_shared(self) -> bool:
        """Whether the full-precision values are in shared memory."""
        return bool(self._data.is_shared())  # type: ignore[no-untyped-call]

    def __dlpack__(self, **options: Any) -> Any:
        """The full-precision values for another library, which may write them from now on.

        Errors as PyTorch's.
        """
        self._mark_assigned()
        return self._data.detach().requires_grad_(self.requires_grad).__dlpack__(**options)

    def storage(self) -> Any:
        """Memory of the full-precision values, where safetensors looks."""
        return self._data._typed_storage()  # type: ignore[no-untyped-call]

    def numpy(self, *, force: bool = False) -> Any:
        """The full-precision values, which NumPy may write from now on.

        Errors as PyTorch's of a tensor that requires grad.
        """
        self._mark_assigned()
        plain = self._data.detach().requires_grad_(self.requires_grad)
        return plain.numpy(force=force)
