"""Kernels of the exact mode, against their formulas in FP64."""

import pytest
import torch
import torch.nn.functional as F

# BF16 rounds results to within 2**-9 of themselves; over random ones the root mean square of the
# error is 0.0017 of the values', and came out as 0.0016 to 0.0017 here and on an H200
BF16_ERROR = 0.002


@pytest.fixture
def kernels(launch):
    """`launch` makes them exact; random numbers are the same in each test."""
    from qat_core.exact import kernels

    torch.manual_seed(0)
    return kernels


def _normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("rows", "width"), [(7, 4096), (65, 576), (1, 64), (40, 128)])
def test_norm_of_a_sum_is_the_norm_of_the_rounded_sum(kernels, device, rows, width):
    x, residual = (3 * torch.randn(rows, width, device=device).bfloat16() for _ in range(2))
    weight = (1 + 0.2 * torch.randn(width, device=device)).bfloat16()
    normed, summed = kernels.norm(x, weight, 1e-6, residual)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, kernels.norm(x + residual, weight, 1e-6)[0])
    assert _error(normed, _normed(summed.double(), weight.double())) < BF16_ERROR


def test_a_norm_of_heads_does_not_depend_on_what_lies_beside_them(kernels, device):
    qkv = torch.randn(50, 12 * 64, device=device).bfloat16()
    weight = torch.randn(64, device=device).bfloat16()
    heads = qkv[:, : 8 * 64].view(50, 8, 64)
    whole = kernels.norm(heads, weight, 1e-6)[0]
    assert torch.equal(whole[7:8], kernels.norm(heads[7:8].contiguous(), weight, 1e-6)[0])
    assert torch.equal(whole[0, 3], kernels.norm(heads[0, 3], weight, 1e-6)[0])


def test_a_norm_reads_columns_that_lie_apart(kernels, device):
    x = torch.randn(3, 5, 192, device=device).bfloat16()[..., ::2]
    residual = torch.randn(3, 5, 96, device=device).bfloat16()
    weight = torch.ones(96, device=device).bfloat16()
    for first, second in ((x, residual), (residual, x)):
        found = kernels.norm(first, weight, 1e-6, second)
        expected = kernels.norm(first.contiguous(), weight, 1e-6, second.contiguous())
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("rows", "width"), [(7, 4096), (300, 128), (65, 576), (1, 64)])
def test_norm_grads(kernels, device, rows, width):
    x, grad = (torch.randn(rows, width, device=device).bfloat16() for _ in range(2))
    weight = (1 + 0.2 * torch.randn(width, device=device)).bfloat16()
    wide = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = torch.autograd.grad(_normed(*wide), wide, grad.double())
    found = kernels.norm_grads(grad, x, weight, 1e-6)
    assert max(map(_error, found, expected)) < BF16_ERROR


@pytest.mark.parametrize("width", [96, 1500])
def test_silu_mul_of_parts_of_one_tensor_is_that_of_rows_alone(kernels, device, width):
    gate, up = (3 * torch.randn(9, 2 * width, device=device)).bfloat16().chunk(2, -1)
    found = kernels.silu_mul(gate, up)
    row = torch.empty(1, width, dtype=torch.bfloat16, device=device)
    kernels.silu_mul(gate[5:6].contiguous(), up[5:6].contiguous(), row)
    assert torch.equal(found[5:6], row)
    assert _error(found, F.silu(gate.double()) * up.double()) < BF16_ERROR


@pytest.mark.parametrize("width", [96, 1500])
def test_silu_mul_grads_of_parts_of_one_tensor(kernels, device, width):
    gate_up = torch.randn(9, 2 * width, device=device).bfloat16()
    grad = torch.randn(9, width, device=device).bfloat16()
    found = torch.empty_like(gate_up)
    kernels.silu_mul_grads(grad, *gate_up.chunk(2, -1), *found.chunk(2, -1))
    wide = gate_up.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    (expected,) = torch.autograd.grad(F.silu(gate) * up, (wide,), grad.double())
    assert _error(found, expected) < BF16_ERROR


def test_log_prob_grad_of_rows_that_lie_apart(kernels, device):
    logits = (3 * torch.randn(5, 6000, device=device)).bfloat16()[:, :5000]
    ids, grad = torch.randint(5000, (5,), device=device), torch.randn(5, device=device)
    wide = logits.double().requires_grad_()
    found = wide.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    (expected,) = torch.autograd.grad(found, (wide,), grad.double())
    result = kernels.log_prob_grad(grad, logits, ids, found.detach().float())
    assert _error(result, expected) < BF16_ERROR


def test_grads_that_a_sum_spreads_out(kernels, device):
    """They have strides of 0: one number in memory for all of them."""
    x = torch.randn(5, 2, 96, device=device).bfloat16()[:, 0]
    weight = torch.randn(96, device=device).bfloat16()
    grad, one = (torch.randn(1, device=device).to(it) for it in (x.dtype, torch.float32))
    found = kernels.norm_grads(grad.expand(5, 96), x, weight, 1e-6)
    expected = kernels.norm_grads(grad.repeat(5, 96), x.clone(), weight, 1e-6)
    assert all(map(torch.equal, found, expected))
    logits = torch.randn(5, 96, device=device).bfloat16()
    ids, told = torch.randint(96, (5,), device=device), torch.randn(5, device=device)
    found = kernels.log_prob_grad(one.expand(5), logits, ids, told)
    assert torch.equal(found, kernels.log_prob_grad(one.repeat(5), logits, ids, told))
