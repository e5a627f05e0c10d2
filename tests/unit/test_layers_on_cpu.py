"""Layers for small models on a CPU compute what transformers' and PyTorch's do."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from qat_core.checkpoint.load import load_model
from qat_core.rollout.layers_on_cpu import attend, use_layers_for_cpu
from tests.nano_models import write_nano


@pytest.mark.parametrize("name", ["nano-dense", "nano-moe"])
def test_norms_have_transformers_bits_and_gradients(tmp_path: Path, name: str) -> None:
    write_nano(name, tmp_path / name, num_layers=1)
    results = []
    for replaced in (False, True):
        model = load_model(tmp_path / name)
        if replaced:
            use_layers_for_cpu(model)
        logits = model(input_ids=torch.arange(16).view(2, 8) % 17).logits
        torch.autograd.backward(logits.float().square().sum())
        grads = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
        results.append((logits, grads))
    (expected, grads), (logits, ours) = results
    assert torch.equal(logits, expected) and ours.keys() == grads.keys()
    for key, grad in grads.items():
        # BF16's step is 2^-8; a gradient passes a few of them
        assert (ours[key] - grad).norm() <= 0.03 * grad.norm(), key


def test_attention_is_pytorchs_within_one_rounding() -> None:
    query_BHQD = torch.randn(3, 4, 5, 16, generator=torch.manual_seed(0)).bfloat16()
    key, value = (torch.randn(3, 2, 5, 16).bfloat16() for _ in range(2))
    mask = torch.ones(5, 5, dtype=torch.bool).tril().expand(3, 1, 5, 5).clone()
    mask[0, :, 1:, 0] = False
    expected = scaled_dot_product_attention(
        query_BHQD, key, value, attn_mask=mask, scale=0.25, enable_gqa=True
    )
    mixed, _ = attend(torch.nn.Module(), query_BHQD, key, value, mask, 0.25)
    torch.testing.assert_close(mixed.transpose(1, 2), expected, rtol=2**-7, atol=2**-7)


def test_padding_that_sees_nothing_gives_no_nan() -> None:
    states = torch.randn(1, 1, 2, 16).bfloat16()
    mask = torch.tensor([[False, False], [False, True]]).view(1, 1, 2, 2)
    mixed, _ = attend(torch.nn.Module(), states, states, states, mask, 0.25)
    assert bool(mixed.isfinite().all())
