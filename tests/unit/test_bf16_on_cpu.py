"""BF16 products in FP32: right, also in gradients; and no other dtype changes.

Each in a process of its own, as a process cannot have its kernels back.
"""

from collections.abc import Callable
from itertools import cycle, pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear

from experiments.support.subprocess_call import call_in_subprocess
from qat_core import bf16_on_cpu

# Values, and gradients of results: each is rounded to BF16 once or twice, by 2**-9 at most.
ROUNDINGS = 2**-7

RANDOM = torch.Generator().manual_seed(0)
A, B, C, STACK_A, STACK_B = (
    torch.randn(*sizes, generator=RANDOM)
    for sizes in ((37, 64), (64, 16), (37, 16), (3, 37, 64), (3, 64, 16))
)
ROWS, COLUMNS, INNER = (
    torch.tensor(ends, dtype=torch.int32) for ends in ([5, 5, 37], [3, 9, 16], [8, 8, 64])
)
As = Callable[[Tensor], Tensor]  # takes a tensor to a dtype
SCALED = {
    "addmm": lambda to: torch.addmm(to(C), to(A), to(B), beta=0.5, alpha=2),
    "baddbmm": lambda to: torch.baddbmm(to(C), to(STACK_A), to(STACK_B)),
}
PRODUCTS = {
    "mm": lambda to: to(A) @ to(B),
    "bmm": lambda to: to(STACK_A) @ to(STACK_B),
    "linear": lambda to: linear(to(STACK_A), to(B).T, to(C)[0]),
    "no rows": lambda to: to(A)[:0] @ to(B),
    "no sums": lambda to: to(A)[:, :0] @ to(B)[:0],
}


def by_fp32(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


def value_and_gradients(product: Callable[[As], Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves: list[Tensor] = []

    def to_leaf(tensor: Tensor) -> Tensor:
        leaves.append(by_fp32(tensor).to(dtype).requires_grad_())
        return leaves[-1]

    result = product(to_leaf)
    result.backward(torch.ones_like(result))
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def check_rounded_once() -> None:
    products = PRODUCTS | SCALED
    exact = {name: value_and_gradients(of, torch.float32) for name, of in products.items()}
    bf16_on_cpu.replace_products()
    bf16_on_cpu.replace_products()  # once is enough
    for name, product in products.items():
        assert torch.equal(product(Tensor.bfloat16), product(by_fp32).bfloat16()), name
        found = value_and_gradients(product, torch.bfloat16)
        for ours, wanted in zip(found, exact[name], strict=True):
            assert ours.dtype is torch.bfloat16 and ours.shape == wanted.shape, name
            assert (ours - wanted).norm() <= ROUNDINGS * wanted.norm(), name


def products_of_groups(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """One by one; zeros behind the last group."""
    groups = [slice(*each) for each in pairwise([0, *ends.tolist()])]
    if a.ndim == b.ndim == 2:
        return torch.stack([a[:, group] @ b[group] for group in groups])
    out = a.new_zeros(a.shape[-2], b.shape[-1])
    for number, group in enumerate(groups):
        if b.ndim == 3:
            out[group] = a[group] @ b[number]
        else:
            out[:, group] = a[number] @ b[:, group]
    return out


def check_groups() -> None:
    """In FP32 too: PyTorch's own differ in the order of their sums at most."""
    bf16_on_cpu.replace_products()
    short = torch.tensor([5, 5, 9], dtype=torch.int32)
    for to in (Tensor.bfloat16, Tensor.float):
        a, b, stack_a, stack_b = map(to, (A, B, STACK_A, STACK_B))
        for factors in (
            *((a, stack_b, ROWS), (a, stack_b, short), (a, b, INNER)),
            *((stack_a, b, COLUMNS), (stack_a, b, short)),
        ):
            assert torch.equal(
                grouped_mm(*factors[:2], offs=factors[2]), products_of_groups(*factors)
            )
        assert torch.equal(grouped_mm(stack_a, stack_b), stack_a @ stack_b)


def check_gradients_of_groups() -> None:
    bf16_on_cpu.replace_products()
    a, stack_b = A.bfloat16().requires_grad_(), STACK_B.bfloat16().requires_grad_()
    grouped_mm(a, stack_b, offs=ROWS).sum().backward()
    ones = torch.ones(32, 16).bfloat16()
    assert a.grad is not None and torch.equal(a.grad[5:], ones @ stack_b[2].T)
    of_none, of_rows = stack_b.grad[1:] if stack_b.grad is not None else ()
    assert not of_none.any() and torch.equal(of_rows, a[5:].T @ ones)


def check_wrong_groups_are_refused() -> None:
    bf16_on_cpu.replace_products()
    a, b, stack_a, stack_b = (t.bfloat16() for t in (A, B, STACK_A, STACK_B))
    product = bf16_on_cpu._grouped_product
    for ends in ([5, 5, 38], [5, 4, 37], [-1, 5, 37]):
        offs = torch.tensor(ends, dtype=torch.int32)
        with pytest.raises(ValueError, match=r"bf16_on_cpu: offs: .* ascending ends of groups"):
            product(a, stack_b, offs)
    with pytest.raises(ValueError, match=r"bf16_on_cpu: offs: .* ascending ends of groups"):
        product(a, b, INNER[:0])
    with pytest.raises(ValueError, match=r"bf16_on_cpu: offs: 2 groups for 3 matrices; name one"):
        product(a, stack_b, ROWS[:2])
    with pytest.raises(ValueError, match=r"bf16_on_cpu: offs: 0 groups for 3 matrices; name one"):
        product(stack_a, b, COLUMNS[:0])
    with pytest.raises(ValueError, match=r"bf16_on_cpu: offs: two stacks of matrices share out"):
        product(stack_a, stack_b, ROWS)


def check_what_grouped_products_lack_is_refused() -> None:
    a, stack_b = A.bfloat16(), STACK_B.bfloat16()
    product = bf16_on_cpu._grouped_product
    with pytest.raises(NotImplementedError, match=r"qat_core\.bf16_on_cpu: bias: add it to"):
        product(a, stack_b, ROWS, bias=STACK_B[:, 0].bfloat16())
    with pytest.raises(NotImplementedError, match=r"bf16_on_cpu: out_dtype: torch\.float32: gro"):
        product(a, stack_b, ROWS, out_dtype=torch.float32)


def check_bits_are_kept() -> None:
    cases: list[tuple[Callable[[As], Tensor], As]] = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.complex64, torch.int64):
        # integers have no such factors
        products = PRODUCTS if dtype is torch.int64 else PRODUCTS | SCALED
        cases += [(product, lambda t, to=dtype: (8 * t).to(to)) for product in products.values()]
    before = [product(to) for product, to in cases]
    bf16_on_cpu.replace_products()
    after = [product(to) for product, to in cases]
    assert all(map(torch.equal, before, after))


def check_mixed_dtypes_end_as_without() -> None:
    before = errors_of_mixed_dtypes()
    bf16_on_cpu.replace_products()
    assert errors_of_mixed_dtypes() == before


def errors_of_mixed_dtypes() -> list[str]:
    errors: list[str] = []
    for product in (PRODUCTS | SCALED).values():
        for mixed in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
            dtypes = cycle(mixed)
            with pytest.raises(RuntimeError) as raised:
                product(lambda tensor, dtypes=dtypes: tensor.to(next(dtypes)))
            errors.append(str(raised.value))
    return errors


def is_replaced(is_fast: bool) -> bool:
    torch.ops.mkldnn = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: is_fast)  # type: ignore[attr-defined]
    bf16_on_cpu.multiply_bf16_in_fp32()
    return bool(bf16_on_cpu.replace_products.cache_info().currsize)


@pytest.mark.parametrize(
    "check",
    [
        check_rounded_once,
        check_groups,
        check_gradients_of_groups,
        check_wrong_groups_are_refused,
        check_what_grouped_products_lack_is_refused,
        check_bits_are_kept,
        check_mixed_dtypes_end_as_without,
    ],
)
def test_products(check: Callable[[], None]) -> None:
    call_in_subprocess(check)


@pytest.mark.parametrize("is_fast", [True, False], ids=["avx512", "avx2"])
def test_kernels_are_replaced_where_pytorch_has_no_fast_ones(is_fast: bool) -> None:
    assert call_in_subprocess(is_replaced, is_fast) is not is_fast
