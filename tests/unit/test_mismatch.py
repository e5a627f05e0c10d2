"""Mismatch metrics against their formulas, written out token by token."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qat_core.rl.mismatch import importance_weights, mismatch_metrics

log_probs = st.floats(-8, 0, width=32)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    train_BT = -3 * torch.rand((4, 6), generator=generator)
    rollout_BT = train_BT + 0.3 * torch.randn((4, 6), generator=generator)
    lengths_B1 = torch.tensor([[6], [3], [1], [5]])
    return train_BT, rollout_BT, (torch.arange(6) < lengths_B1).float()


def test_equals_the_formulas_token_by_token(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    train, rollout, mask = (x.tolist() for x in batch)
    d = [
        [p - q for p, q, m in zip(ps, qs, ms, strict=True) if m]
        for ps, qs, ms in zip(train, rollout, mask, strict=True)
    ]
    tokens = [x for row in d for x in row]
    mean = lambda xs: sum(xs) / len(xs)  # noqa: E731
    expected = {
        "kl": mean([-x for x in tokens]),
        "k3_kl": mean([math.exp(x) - x - 1 for x in tokens]),
        "chi2_token": mean([math.exp(2 * x) for x in tokens]) - 1,
        "chi2_seq": mean([math.exp(2 * sum(row)) for row in d]) - 1,
        "log_ppl_diff": mean([-mean(row) for row in d]),
        "log_ppl_abs_diff": mean([abs(mean(row)) for row in d]),
        "ppl_ratio": mean([math.exp(-mean(row)) for row in d]),
        "rollout_is_mean": mean([min(math.exp(x), 1.2) for x in tokens]),
        "rollout_is_max": max(min(math.exp(x), 1.2) for x in tokens),
        "rollout_is_ratio_fraction_high": mean([math.exp(x) > 1.2 for x in tokens]),
        "rollout_is_ratio_fraction_low": mean([math.exp(x) < 1 / 1.2 for x in tokens]),
    }
    metrics = mismatch_metrics(*batch, threshold=1.2)
    for name, value in expected.items():
        # FP32 sums of 15 tokens: relative error below 1e-6, times ten
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_what_lies_off_the_mask_does_not_count(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    train_BT, rollout_BT, mask_BT = batch
    garbage_BT = torch.where(mask_BT > 0, train_BT, torch.full_like(train_BT, -7.0))
    assert mismatch_metrics(garbage_BT, rollout_BT, mask_BT, 2.0) == mismatch_metrics(*batch, 2.0)


def test_equal_policies_have_no_mismatch(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    train_BT, _, mask_BT = batch
    metrics = mismatch_metrics(train_BT, train_BT, mask_BT, 2.0)
    assert metrics["rollout_corr/kl"] == metrics["rollout_corr/k3_kl"] == 0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, abs=1e-6)


@given(st.lists(st.tuples(log_probs, log_probs), min_size=2, max_size=8))
def test_k3_is_never_negative_and_weights_are_capped(pairs: list[tuple[float, float]]) -> None:
    train_BT, rollout_BT = torch.tensor(pairs).T[:, None]
    mask_BT = torch.ones_like(train_BT)
    metrics = mismatch_metrics(train_BT, rollout_BT, mask_BT, 2.0)
    assert metrics["rollout_corr/k3_kl"] >= 0
    weights_BT = importance_weights(train_BT, rollout_BT, mask_BT, 2.0)
    assert bool((weights_BT <= 2).all()) and bool((weights_BT > 0).all())


def test_tiny_k3_is_not_lost_to_cancellation() -> None:
    zeros_BT = torch.zeros(2, 2)
    metrics = mismatch_metrics(zeros_BT + 1e-6, zeros_BT, zeros_BT + 1, 2.0)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(5e-13, rel=1e-3)  # d**2 / 2
