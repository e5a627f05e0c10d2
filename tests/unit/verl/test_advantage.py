"""verl finds the advantage that it lacks, and gives it what it needs."""

import pytest
import torch

pytest.importorskip("verl", reason="needs requirements/engines.txt")

from verl.trainer.ppo.core_algos import get_adv_estimator_fn

import qat_core.verl.advantage  # noqa: F401  # registers it


def test_right_is_plus_one_and_wrong_minus_one_on_the_responses_tokens() -> None:
    rewards_BT = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    mask_BT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    estimate = get_adv_estimator_fn("reward")
    advantages_BT, returns_BT = estimate(
        token_level_rewards=rewards_BT, response_mask=mask_BT, index=None, config=None
    )
    assert advantages_BT.tolist() == [[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]]
    assert torch.equal(returns_BT, advantages_BT)
