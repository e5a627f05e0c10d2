"""BF16 matrix products on processors for which PyTorch has no fast ones.

oneDNN multiplies BF16 matrices on x86 from AVX-512 on; elsewhere PyTorch falls back to a scalar
loop. Products of BF16 values are exact in FP32, so that these operators are the same with FP32
inputs and one rounding at the end, but for the order of their sums.

Replaced are mm, addmm, bmm, baddbmm and grouped_mm, and with them linear layers and `@` of
matrices. Not replaced are their variants with `out=`, products with a vector (mv) and attention.
Nothing happens in a PyTorch without oneDNN, which is asked what the processor can do.
"""

import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# a kernel is replaced for as long as this lives
_library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def multiply_bf16_in_fp32() -> None:
    """Lets this process multiply BF16 matrices on the CPU in FP32, where that is faster.

    For programs, at their start: it replaces kernels of PyTorch. Nothing happens where oneDNN can
    multiply BF16 or is missing, and the second time.
    """
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if has_onednn and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        replace_products()


@cache
def replace_products() -> None:
    """Replaces the CPU's kernels of matrix products; those of other dtypes give the same bits."""
    with warnings.catch_warnings():  # that there is a kernel already
        warnings.simplefilter("ignore")
        kernels: dict[Any, Callable[..., Tensor]] = {
            operator.default: partial(_multiply, operator.out)
            for operator in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
        }
        for operator, kernel in (kernels | {aten._grouped_mm.default: _grouped_product}).items():
            _library.impl(operator, kernel, "CPU")  # type: ignore[no-untyped-call]


def _multiply(into: Callable[..., Tensor], *tensors: Tensor, **factors: float) -> Tensor:
    """By the variant of an operator that writes into a tensor: its kernel is not replaced.

    Mixed dtypes end with the operator's own error: of `out` it asks for what it is given here.
    """
    dtype = tensors[0].dtype
    if all(tensor.dtype is torch.bfloat16 for tensor in tensors):
        tensors = tuple(tensor.float() for tensor in tensors)
    out = tensors[0 if tensors[0].ndim == 2 else -1].new_empty(0)
    return into(*tensors, **factors, out=out).to(dtype)


def _grouped_product(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch._grouped_mm`: a product for each group, whose last row or column `offs` counts up to.

    What groups share out is the dimension that a matrix has and its stack of matrices has not:
    rows of `left`, columns of `right`, or, with two matrices, the one they have in common.
    Rows and columns behind the last group are 0 in the product.

    Raises:
        NotImplementedError: a bias or another output dtype, which transformers does not use.
        ValueError: `offs` names no group, not one for each matrix of the stack, or ends that do not
            ascend within that dimension; or there are two stacks, which share out nothing.
    """
    if bias is not None:
        raise NotImplementedError(f"{__name__}: bias: add it to the grouped product")
    if out_dtype not in (None, left.dtype):
        raise NotImplementedError(
            f"{__name__}: out_dtype: {out_dtype}: grouped products have the dtype of their inputs, "
            f"{left.dtype}; convert the product"
        )
    if offs is None:
        return torch.bmm(left, right)
    if left.ndim == right.ndim == 3:
        raise ValueError(f"{__name__}: offs: two stacks of matrices share out nothing; use None")
    if left.ndim == right.ndim == 2:
        groups = _groups(offs, left.shape[1])
        return torch.stack([left[:, group] @ right[group] for group in groups])
    if left.ndim == 2:
        groups = _groups(offs, left.shape[0], right)
        product: Any = [left[group] @ matrix for group, matrix in zip(groups, right, strict=True)]
        rest = left.new_zeros(left.shape[0] - groups[-1].stop, right.shape[2])
        return torch.cat([*product, rest])
    groups = _groups(offs, right.shape[1], left)
    product = [matrix @ right[:, group] for matrix, group in zip(left, groups, strict=True)]
    rest = left.new_zeros(left.shape[1], right.shape[1] - groups[-1].stop)
    return torch.cat([*product, rest], 1)


def _groups(offs: Tensor, size: int, stack: Tensor | None = None) -> list[slice]:
    ends = offs.tolist()
    if stack is not None and len(ends) != len(stack):
        raise ValueError(
            f"{__name__}: offs: {len(ends)} groups for {len(stack)} matrices; name one for each"
        )
    if not ends or sorted([0, *ends, size]) != [0, *ends, size]:
        raise ValueError(
            f"{__name__}: offs: {ends} are not the ascending ends of groups of {size} rows or "
            "columns; name one group or more"
        )
    return [slice(start, end) for start, end in pairwise([0, *ends])]
