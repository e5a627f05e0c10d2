"""An update: advantages, losses, corrections, attention, FP32 masters, distance in grid steps."""

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from experiments.rl.config import Correction, GrpoConfig
from experiments.rl.loss import (
    advantages,
    centred_losses,
    correction_weights,
    drift_term_metrics,
    group_advantages,
    policy_losses,
)
from experiments.rl.optimizer import MasterAdamW
from experiments.rl.policy import ATTENTION
from experiments.rl.weight_distance import WeightDistance
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare

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
    [("sequence_mask", "seq_sum_k1", "0.5_2.0"), ("geometric_mask", "seq_mean_k1", "0.999_1.001")],
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


CONFIG = GrpoConfig(steps=1)


def test_advantages_are_normalised_within_each_group() -> None:
    advantages = group_advantages(torch.tensor([1.0, 0, 0, 0, 5, 5, 5, 5]), group_size=4)
    assert advantages[:4].mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages[:4].std().item() == pytest.approx(1, abs=1e-4)  # the epsilon of 1e-6 / 0.5
    assert advantages[4:].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("group_size", [3, 6, 8, 16])
def test_equal_rewards_are_no_advantage(group_size: int) -> None:
    rewards = torch.linspace(-1, 3, 101).repeat_interleave(group_size)
    assert not group_advantages(rewards, group_size).any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        pytest.param(1.0, 1.0, -1.0, False, id="on-policy"),
        pytest.param(1.5, 1.0, -1.28, True, id="upper-clip"),
        pytest.param(0.5, 1.0, -0.5, False, id="low-ratio-of-a-good-token-is-not-clipped"),
        pytest.param(0.5, -1.0, 0.8, True, id="lower-clip"),
        pytest.param(5.0, -1.0, 5.0, False, id="bad-token-below-the-dual-clip"),
        pytest.param(20.0, -1.0, 10.0, False, id="dual-clip"),
    ],
)
def test_loss_of_one_token(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    log_prob = torch.tensor([[ratio]]).log()
    losses, mask = policy_losses(log_prob, torch.zeros(1, 1), torch.tensor([[advantage]]), CONFIG)
    assert losses.item() == pytest.approx(loss, rel=1e-6)
    assert mask.item() is clipped


def test_updates_too_small_for_bf16_add_up() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.accumulate()
        optimizer.step(max_grad_norm=10.0)
    # Adam moves by lr a step under a constant gradient: 0.99, of which BF16 keeps 8 bits
    assert optimizer.masters[0][0].item() == pytest.approx(0.99, abs=1e-5)
    assert weight.tolist() == [0.98828125] * 4


def test_micro_batch_gradients_add_up_in_fp32_and_are_clipped() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], lr=1.0, weight_decay=0.0)
    for _ in range(300):  # in BF16 the sum would stop at 256
        weight.grad = torch.ones_like(weight)
        optimizer.accumulate()
    assert optimizer.step(max_grad_norm=1.0) == 300.0
    first_moment = optimizer.adamw.state[optimizer.masters[0]]["exp_avg"]
    assert first_moment.item() == pytest.approx(0.1), "a tenth of the clipped gradient"


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_is_dropped(bad: float) -> None:
    def run(*gradients: list[float]) -> tuple[MasterAdamW, list[float]]:
        optimizer = MasterAdamW([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], 0.1, 0.1)
        norms = []
        for gradient in gradients:
            optimizer.parameters[0].grad = torch.tensor(gradient).bfloat16()
            optimizer.accumulate()
            norms.append(optimizer.step(1.0))
        return optimizer, norms

    without, _ = run([1.0, 2.0], [2.0, -1.0])
    skipping, norms = run([1.0, 2.0], [bad, 0.0], [2.0, -1.0])
    assert [math.isfinite(norm) for norm in norms] == [True, False, True]
    assert torch.equal(skipping.masters[0], without.masters[0])
    assert torch.equal(skipping.parameters[0], without.parameters[0])


def test_distance_of_one_grid_step_is_one() -> None:
    model = nn.Sequential(nn.Linear(32, 8, bias=False))
    with torch.no_grad():  # largest value 6 at scale 1: the grid's values are its codes
        model[0].weight.copy_(torch.tensor([6.0, 0.0, 1.0, -3.0] * 8).expand(8, 32))
    distance = WeightDistance(model, plan(model, Recipe()), Recipe())
    assert distance.rms(model).item() == 0.0
    with torch.no_grad():
        model[0].weight.add_(0.5)  # the finest step
    assert distance.rms(model).item() == pytest.approx(1.0)
    with torch.no_grad():  # two of eight rows move by three more
        model[0].weight[:2].add_(1.5)
    assert distance.rms(model).item() == pytest.approx(((6 * 1 + 2 * 16) / 8) ** 0.5)


def test_blocks_of_zeros_count_as_not_moved() -> None:
    model = nn.Sequential(nn.Linear(32, 1, bias=False))
    with torch.no_grad():
        model[0].weight.zero_()[:, :16] = 6.0
    distance = WeightDistance(model, plan(model, Recipe()), Recipe())
    with torch.no_grad():
        model[0].weight.add_(0.5)
    assert distance.rms(model).item() == pytest.approx(0.5**0.5)


def test_of_a_prepared_model_all_weights_count() -> None:
    model = nn.Sequential(nn.Linear(32, 8, bias=False), nn.Linear(32, 8, bias=False))
    everything = plan(model, Recipe())
    prepare(model, Recipe(ignore=("1",)))
    distance = WeightDistance(model, everything, Recipe())
    assert distance.num_weights == 2 * 32 * 8
    with torch.no_grad():
        model[1].weight.add_(0.5)
    assert distance.rms(model).item() > 0


@pytest.mark.gpu
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
