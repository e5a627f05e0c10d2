"""What code that reaches for a tensor's memory finds in a weight: the full-precision values.

A wrapper tensor has no memory of its own: PyTorch's methods would give null pointers, or change the
wrapper alone. `untyped_storage()` is the wrapper's own, which PyTorch's compiler needs, and empty:
take the storage of an entry of the state dict.
"""

from abc import abstractmethod
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn


class FullPrecisionMemory(torch.Tensor):
    """A wrapper tensor that shows the memory of `_data`."""

    _data: Tensor
    weight_name: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def _wrap(cls, data: Tensor) -> Self:
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            layout=data.layout,
            device=data.device,
            storage_size=0,  # no reader takes the wrapper's own for memory
        )
        torch._C._set_throw_on_mutable_data_ptr(self)  # else C code writes to address 0
        self._data = data
        return self

    def plain(self) -> Tensor:
        """The full-precision values as a plain tensor that shares their memory."""
        return self._data

    def tolist(self) -> Any:
        """The full-precision values."""
        return self._data.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.weight_name}, {self._data!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copies as a plain tensor."""
        copied: Tensor = deepcopy(self._data.detach(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the plain tensor or parameter, which anyone can read."""
        plain = self._data.detach()
        if isinstance(self, nn.Parameter):
            plain = nn.Parameter(plain, requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

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
