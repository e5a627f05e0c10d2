"""Advantages and the clipped loss."""

import pytest
import torch

from experiments.rl.config import GrpoConfig
from experiments.rl.loss import group_advantages, policy_losses

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


def test_clipped_tokens_have_no_gradient() -> None:
    log_prob = torch.tensor([[0.5, -0.1]], requires_grad=True)
    losses, _ = policy_losses(log_prob, torch.zeros(1, 2), torch.ones(1, 1), CONFIG)
    losses.sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad[0, 0] == 0 and log_prob.grad[0, 1] != 0
