"""verl's advantages without centring: +1 for a right response, -1 for a wrong one.

VERL_USE_EXTERNAL_MODULES=qat_core.verl.advantage ... algorithm.adv_estimator=reward
All of verl 0.9.1's own subtract a baseline or need a critic.
"""
# mypy: disable-error-code="untyped-decorator"

from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est


@register_adv_est("reward")
def compute(token_level_rewards: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Advantages and returns, FP32 (B, T), of rewards of 1 or 0 at some token of each response."""
    rewards_B1 = token_level_rewards.sum(-1, keepdim=True)
    advantages_BT = (2.0 * rewards_B1.float() - 1.0) * response_mask
    return advantages_BT, advantages_BT
