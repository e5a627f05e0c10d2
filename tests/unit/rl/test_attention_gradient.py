"""Attention as the policy runs it: finite gradients where cuDNN's kernel gives NaN."""

import pytest
import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from experiments.rl.policy import ATTENTION

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("length", [64, 128, 191, 192, 320])
def test_gradients_are_finite_at_odd_multiples_of_64(length: int) -> None:
    """With scores of -120 a row's sum of exponentials is below what FP32 holds."""
    query = torch.zeros(2, 4, length, 64, device="cuda", dtype=torch.bfloat16)
    key, value = torch.zeros_like(query), torch.randn_like(query)
    query[..., 0], key[..., 0] = 1.0, -120 * 64**0.5
    for tensor in (query, key, value):
        tensor.requires_grad_()
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()[None, None]
    with sdpa_kernel(ATTENTION):
        scaled_dot_product_attention(query, key, value, attn_mask=mask).float().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (query, key, value))
