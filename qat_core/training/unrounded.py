"""What operators other than products make of a weight outside a forward pass, in full precision.

It serves penalties, averages, logs and files. A product with anything else would multiply with
weights that were never rounded, and is refused; products of such tensors with one another are parts
of a penalty, as of orthogonality. Results of fewer than two dimensions are statistics, plain
tensors. So is what was detached: that is how code says that it wants full precision.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from qat_core.training.forward_calls import in_backward
from qat_core.training.full_precision import FullPrecisionMemory
from qat_core.training.operators import DETACH, is_compute, operands, read_all, read_dict


class Unrounded(FullPrecisionMemory):
    """Wraps `data`, which `operator` made of weight `weight_name`."""

    operator: str

    @staticmethod
    def __new__(cls, data: Tensor, weight_name: str, operator: str) -> "Unrounded":
        """Wraps `data` without a copy."""
        self: Unrounded = cls._wrap(data)
        self.weight_name, self.operator = weight_name, operator
        return self

    def _assign(self, value: Tensor) -> None:
        raise ValueError(f"{self.weight_name}: .data of a result of {self.operator}: detach it")

    def _mark_assigned(self) -> None:
        """Nothing: the memory is not the weight's."""

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` in full precision; what it makes is unrounded too."""
        kwargs = kwargs or {}
        tensors = operands([*args, *kwargs.values()])
        self = next(tensor for tensor in tensors if isinstance(tensor, cls))
        others = [it for it in tensors if not isinstance(it, cls) and it.is_floating_point()]
        if others and is_compute(func) and not in_backward():
            raise ValueError(
                f"{self.weight_name}: {func} would multiply with full precision: {self.operator} "
                "read the weight outside a forward pass of the model: do it in the forward() of a "
                "module of the model, or detach the weight to multiply with full precision"
            )
        out = func(*read_all(cls, cls.plain, args), **read_dict(cls, cls.plain, kwargs))
        if func is DETACH or (in_backward() and not func.is_view):
            return out
        wrapped = unrounded(out, self.weight_name, self.operator, always=func.is_view)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)  # type: ignore[no-untyped-call]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Inner tensors and constants, for torch.compile."""
        return ["_data"], (self.weight_name, self.operator)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, Tensor], context: Any, _outer_size: Any, _outer_stride: Any
    ) -> "Unrounded":
        """Inverse of `__tensor_flatten__`."""
        return Unrounded(inner_tensors["_data"], *context)


def unrounded(out: Any, weight_name: str, operator: str, *, always: bool = False) -> Any:
    """Results of an operator on a weight; `always`: of any dtype and number of dimensions."""
    if isinstance(out, list | tuple):
        return type(out)([unrounded(it, weight_name, operator, always=always) for it in out])
    if not isinstance(out, Tensor) or isinstance(out, Unrounded):
        return out
    is_matrix = out.ndim >= 2 and (out.is_floating_point() or out.is_complex())
    return Unrounded(out, weight_name, operator) if always or is_matrix else out
