"""Corrections of the rollout mismatch: verl's numbers, and what score centering removes."""

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from experiments.rl.config import Correction, GrpoConfig
from experiments.rl.loss import advantages, centred_losses, correction_weights, drift_term_metrics

VOCABULARY = 6


def config(**changed: object) -> GrpoConfig:
    return GrpoConfig.model_validate({"steps": 1, **changed})


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of trainer and rollout, whose sequence ratios lie on both sides of the bands."""
    generator = torch.Generator().manual_seed(0)
    mask_BT = torch.ones(64, 9)
    mask_BT[::2, 5:] = 0.0
    train_BT = -torch.rand(64, 9, generator=generator)
    spread_B1 = torch.logspace(-4, -0.5, 64)[:, None]
    return train_BT, train_BT + spread_B1 * torch.randn(64, 9, generator=generator), mask_BT


@pytest.mark.parametrize(
    ("correction", "option", "band"),
    [
        ("sequence_mask", "seq_sum_k1", "0.5_2.0"),
        ("geometric_mask", "seq_mean_k1", "0.999_1.001"),
    ],
)
def test_masks_are_verls(
    batch: tuple[Tensor, Tensor, Tensor], correction: Correction, option: str, band: str
) -> None:
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    train_BT, rollout_BT, mask_BT = batch
    expected_BT, _ = helper.compute_rollout_rejection_mask(
        train_BT - rollout_BT, mask_BT, option, band
    )
    weights_BT = correction_weights(*batch, config(correction=correction))
    assert torch.equal(weights_BT, expected_BT)
    assert 0 < weights_BT.sum() < mask_BT.sum(), "some are kept, some are dropped"


def test_a_wider_band_keeps_more(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    kept = [
        correction_weights(*batch, config(correction="sequence_mask", rollout_rs_band=band)).sum()
        for band in ((0.9, 1.1), (0.5, 2.0), (0.01, 100.0))
    ]
    assert kept == sorted(kept) and kept[-1] == batch[2].sum()


@pytest.mark.parametrize("correction", ["none", "score_centering"])
def test_without_weights_every_token_counts_once(
    batch: tuple[Tensor, Tensor, Tensor], correction: Correction
) -> None:
    settings = config(correction=correction, mini_batch_prompts=32)
    assert torch.equal(correction_weights(*batch, settings), batch[2])


def test_centring_removes_the_drift_term_exactly() -> None:
    """Over all tokens of one prefix, weighted by q: E_q[A s~] = Cov_q(A, s), E_q[s~] = 0."""
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    q_V = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).softmax(-1)
    rewards_V = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    p_V = logits_V.softmax(-1)

    def mean_gradient(advantages_V: Tensor) -> Tensor:
        """-E_q of the losses' gradients, every token sampled as often as q says."""
        leaf_V = logits_V.clone().requires_grad_()
        log_probs_V = leaf_V.log_softmax(-1)
        expected_V = (q_V * log_probs_V).sum().expand(VOCABULARY)
        ratio_V = (log_probs_V - log_probs_V.detach()).exp()
        losses_V = centred_losses(-advantages_V * ratio_V, advantages_V, expected_V)
        (gradient_V,) = torch.autograd.grad((q_V * losses_V).sum(), leaf_V)
        return -gradient_V

    # the score of token a in the logits is e_a - p
    scores_VV = torch.eye(VOCABULARY, dtype=torch.float64) - p_V
    covariance_V = (q_V * rewards_V) @ scores_VV - (q_V @ rewards_V) * (q_V @ scores_VV)
    assert torch.allclose(mean_gradient(rewards_V), covariance_V, atol=1e-14)
    assert torch.allclose(mean_gradient(torch.ones_like(q_V)), torch.zeros_like(q_V), atol=1e-14)
    assert (q_V - p_V).norm() > 0.1, "there was a drift to remove"


def test_centring_changes_no_loss() -> None:
    losses_BT, expected_BT = torch.randn(2, 3), torch.randn(2, 3)
    assert torch.equal(centred_losses(losses_BT, torch.ones(2, 1), expected_BT), losses_BT)


def test_drift_term_metrics_by_hand() -> None:
    mask_BT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    means_BT = torch.tensor([[0.01, 0.02, 0.03], [0.10, 9.0, 9.0]])
    metrics = drift_term_metrics(torch.tensor([[1.0], [-1.0]]), means_BT, mask_BT)
    assert metrics["drift_term/advantage"].item() == pytest.approx((3 - 1) / 4)
    assert metrics["drift_term/score"].item() == pytest.approx((0.16 / 4) ** 0.5)


def test_rewards_as_advantages() -> None:
    taken = advantages(torch.tensor([1.0, 0.0, 0.0]), config(advantage="reward"))
    assert taken.tolist() == [1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({"rollout_rs_band": (0.5, 2.0)}, "token_tis has no mask", id="band, no mask"),
        pytest.param(
            {"correction": "sequence_mask", "rollout_rs_band": (1.1, 2.0)},
            "drops responses without a mismatch",
            id="band without 1",
        ),
        pytest.param(
            {"correction": "score_centering", "mini_batch_prompts": 16},
            "one update a batch; set mini_batch_prompts to prompts_per_step, 32",
            id="centring off-policy",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changed)
