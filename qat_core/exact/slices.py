"""Long sums cut in two: each half is added by itself in FP32, then both, then the sum is rounded.

Few rows and columns with a long sum leave half of a GPU idle. Cut in the same way on both sides it
gives twice as many blocks of threads work in few_rows.cu, with the same bits. That is for layers
whose sums tensor parallel ranks share out, o_proj and down_proj, as others are wide. Below K = 2 N,
halves in FP32 would cost many rows more time than few rows gain.
"""

import torch
from torch import Tensor

from qat_core.exact.functions import linear
from qat_core.exact.products import product_by, whole, with_another_row

LONG = 4096  # numbers of K
GRAIN = 64  # numbers of K that few_rows.cu fetches at once, at least
ROWS_AT_ONCE = 8192  # rows whose halves lie in FP32 at once


def slices_of(n: int, k: int) -> int:
    """Into how many equal slices sums of K numbers are cut, with a weight (N, K): 1 or 2."""
    return 2 if k >= LONG and k >= 2 * n and k % (2 * GRAIN) == 0 else 1


def add_up(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, BF16 (..., N) of BF16 (..., K), without gradients, in `slices_of(N, K)`."""
    if slices_of(*weight.shape) == 1:
        return whole(x, weight)
    if x.numel() == x.shape[-1]:  # see `products.whole`
        return with_another_row(add_up, x, weight)
    rows = x.reshape(-1, x.shape[-1])
    out = rows.new_empty(len(rows), len(weight))
    count = max(1, -(-len(rows) // ROWS_AT_ONCE))
    for block, of_block in zip(rows.chunk(count), out.chunk(count), strict=True):  # never one row
        _add_halves(block, weight, of_block)
    return out.view(*x.shape[:-1], len(weight))


def _add_halves(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    pairs = zip(rows.chunk(2, dim=-1), weight.chunk(2, dim=-1), strict=True)
    if rows.device.type == "cpu":  # which has no product of BF16 in FP32
        first, second = (part.float() @ columns.float().T for part, columns in pairs)
        out.copy_(first + second)
        return
    (part, columns), (other, others) = pairs
    first = torch.mm(part, columns.T, out_dtype=torch.float32)
    out.copy_(torch.addmm(first, other, others.T, out_dtype=torch.float32, out=first))


def shared_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `functions.linear`, of a layer whose sums ranks share out."""
    if slices_of(*weight.shape) == 1:
        return linear(x, weight, bias)
    out = product_by(add_up, x, weight)
    return out if bias is None else out + bias
