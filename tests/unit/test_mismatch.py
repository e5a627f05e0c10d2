"""Mismatch metrics against values worked out by hand, and against verl's."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qat_core.mismatch import importance_weights, mismatch_metrics

log_probs = st.floats(-8, 0, width=32)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    train_BT = -3 * torch.rand((4, 6), generator=generator)
    rollout_BT = train_BT + 0.3 * torch.randn((4, 6), generator=generator)
    lengths_B1 = torch.tensor([[6], [3], [1], [5]])
    return train_BT, rollout_BT, (torch.arange(6) < lengths_B1).float()


def test_all_metrics_of_three_tokens_worked_out_by_hand() -> None:
    """Probabilities and ratios are powers of two; the mask leaves two tokens and one."""
    train_BT = torch.tensor([[1 / 2, 1 / 2], [1 / 16, 1 / 2]]).log()
    rollout_BT = torch.tensor([[1 / 8, 1 / 2], [1 / 2, 1 / 4]]).log()
    ln2 = math.log(2)  # d = 2 ln2, 0 and -3 ln2; ratios 4, 1 and 1/8; weights 2, 1 and 1/8
    expected = {
        "training_ppl": (2 + 16) / 2,
        "training_log_ppl": (1 + 4) / 2 * ln2,
        "rollout_ppl": (4 + 2) / 2,
        "rollout_log_ppl": (2 + 1) / 2 * ln2,
        "log_ppl_diff": (-1 + 3) / 2 * ln2,
        "log_ppl_abs_diff": (1 + 3) / 2 * ln2,
        "log_ppl_diff_max": 3 * ln2,
        "log_ppl_diff_min": -1 * ln2,
        "ppl_ratio": (1 / 2 + 8) / 2,
        "kl": (-2 + 0 + 3) / 3 * ln2,
        "k3_kl": (4 + 1 + 1 / 8) / 3 - (2 + 0 - 3) / 3 * ln2 - 1,
        "chi2_token": (16 + 1 + 1 / 64) / 3 - 1,
        "chi2_seq": (16 + 1 / 64) / 2 - 1,
        "abs_diff_p50": 2 * ln2,
        "abs_diff_p99": 2.98 * ln2,
        "rollout_is_mean": 25 / 24,
        "rollout_is_max": 2,
        "rollout_is_min": 1 / 8,
        "rollout_is_std": math.sqrt(107 / 64 - (25 / 24) ** 2),
        "rollout_is_ratio_fraction_high": 1 / 3,
        "rollout_is_ratio_fraction_low": 1 / 3,
        "rollout_is_eff_sample_size": (25 / 24) ** 2 / (107 / 64),
        "rollout_is_seq_mean": (3 / 2 + 1 / 8) / 2,
        "rollout_is_seq_std": (3 / 2 - 1 / 8) / math.sqrt(2),
        "rollout_is_seq_max": 3 / 2,
        "rollout_is_seq_min": 1 / 8,
        "rollout_is_seq_max_deviation": 7 / 8,
        "rollout_is_seq_fraction_high": 1 / 2,  # of the ratios before the cap: 5/2 and 1/8
        "rollout_is_seq_fraction_low": 1 / 2,
    }
    mask_BT = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    metrics = mismatch_metrics(train_BT, rollout_BT, mask_BT, threshold=2.0)
    # FP32 has an epsilon of 1.2e-7: seen off by half of it at most, allowed are eight
    assert metrics == pytest.approx(
        {f"rollout_corr/{name}": value for name, value in expected.items()}, rel=1e-6
    )


@pytest.mark.parametrize("num_sequences", [1, 16])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.1, 1.0, 10.0])  # at 10, exp(d) meets its bound
def test_equals_verl(scale: float, num_sequences: int) -> None:
    helper = pytest.importorskip(
        "verl.trainer.ppo.rollout_corr_helper", reason="needs requirements/engines.txt"
    )
    generator = torch.Generator().manual_seed(0)
    train_BT = -3 * torch.rand((num_sequences, 24), generator=generator)
    rollout_BT = train_BT + scale * torch.randn(train_BT.shape, generator=generator)
    lengths_B1 = torch.randint(2, 25, (num_sequences, 1), generator=generator)
    mask_BT = (torch.arange(24) < lengths_B1).float()
    batch = train_BT, rollout_BT, mask_BT
    weights, _, theirs = helper.compute_rollout_correction_and_rejection_mask(
        *batch, rollout_is="token", rollout_is_threshold=2.0
    )
    ours = mismatch_metrics(*batch, threshold=2.0)
    assert ours.keys() - theirs.keys() == {f"rollout_corr/abs_diff_p{p}" for p in (50, 99)}
    # Over 300 seeds 25 metrics equal verl's in every bit. Two are computed another way and differ:
    # the k3 KL by 5.5e-8 where it is small and 3.2e-7 of itself elsewhere, the sample size by 6e-8.
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-6, abs=1e-7)
    assert torch.equal(importance_weights(*batch, 2.0), weights.batch["rollout_is_weights"])


def test_what_lies_off_the_mask_does_not_count(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    train_BT, rollout_BT, mask_BT = batch
    garbage_BT = torch.where(mask_BT > 0, train_BT, torch.full_like(train_BT, -7.0))
    assert mismatch_metrics(garbage_BT, rollout_BT, mask_BT, 2.0) == mismatch_metrics(*batch, 2.0)


@pytest.mark.parametrize("d", [-0.5, 0.5])
def test_weights_off_the_mask_are_no_extremes(
    batch: tuple[Tensor, Tensor, Tensor], d: float
) -> None:
    _, rollout_BT, mask_BT = batch
    metrics = mismatch_metrics(rollout_BT + d, rollout_BT, mask_BT, 2.0)
    extremes = [metrics[f"rollout_corr/rollout_is_{name}"] for name in ("min", "max")]
    # FP32 of log-probs down to -4: d is off by 2.4e-7 at most, times four
    assert extremes == pytest.approx(2 * [math.exp(d)], rel=1e-6)


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
