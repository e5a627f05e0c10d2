"""The straight-through rounding: a product reads w' where autograd has recorded w.

    w' = dequantize(quantize(w))        y = f(w')        dL/dw := dL/dw'

Autograd runs above, on the operator with the parameter itself: the gradient that it computes with
w' reaches w as it is (straight-through estimator, arXiv 1308.3432).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from qat_core.nvfp4 import fake_quantize
from qat_core.options import BlockScaleMethod
from qat_core.training.operators import read_all, read_dict


def straight_through(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weight_type: type,
    rounded: Callable[[Any], Tensor],
) -> Any:
    """Runs an operator below autograd with `rounded(w)` for each w of `weight_type`."""
    return func(*read_all(weight_type, rounded, args), **read_dict(weight_type, rounded, kwargs))


def round_to_nvfp4(
    data: Tensor, global_scale: Tensor, method: BlockScaleMethod, name: str
) -> Tensor:
    """`data` (..., N, K) rounded to NVFP4, in its own dtype; arguments as of `fake_quantize`."""
    return as_dtype_of(data, fake_quantize(data, global_scale, method, name=name))


def as_dtype_of(data: Tensor, rounded: Tensor) -> Tensor:
    """The rounded values in the dtype of `data`; no copy where it is theirs."""
    return rounded if rounded.dtype == data.dtype else rounded.to(data.dtype)
