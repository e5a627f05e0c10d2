"""GRPO with DAPO's asymmetric clip, as in verl's recipe: advantages and the token-mean loss.

Sources: GRPO, arXiv 2402.03300; clip-higher and the token-level mean, DAPO, arXiv 2503.14476; dual
clip, arXiv 1912.09729; truncated importance sampling between trainer and rollout engine,
https://fengyao.notion.site/off-policy-rl.
"""

import torch
from torch import Tensor

from qat_core.rl.config import GrpoConfig


def group_advantages(rewards_B: Tensor, group_size: int) -> Tensor:
    """(r - mean) / (std + 1e-6) within each group of `group_size` neighbours, FP32 (B,)."""
    groups = rewards_B.float().view(-1, group_size)
    centred = groups - groups.mean(-1, keepdim=True)
    return (centred / (groups.std(-1, keepdim=True) + 1e-6)).view(-1)


def reward_advantages(rewards: Tensor) -> Tensor:
    """+1 for rewards of 1 and -1 for those of 0, of any shape."""
    return 2.0 * rewards.float() - 1.0


def advantages(rewards_B: Tensor, config: GrpoConfig) -> Tensor:
    """One advantage a response, FP32 (B,): group-centred, or +1 and -1 for rewards of 1 and 0."""
    if config.advantage == "group":
        return group_advantages(rewards_B, config.responses_per_prompt)
    return reward_advantages(rewards_B)


def policy_losses(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_B1: Tensor, config: GrpoConfig
) -> tuple[Tensor, Tensor]:
    """Clipped policy-gradient losses of every token.

    Args:
        log_probs_BT: of the current policy, with gradient.
        old_log_probs_BT: of the policy before this step's updates.
        advantages_B1: one advantage a sequence.
        config: the clip ratios.

    Returns:
        Losses (B, T) and a mask (B, T) of the tokens whose gradient a clip cut off: the upper one
        where the advantage is positive, the lower one where it is negative.
    """
    ratio_BT = (log_probs_BT - old_log_probs_BT).clamp(-20.0, 20.0).exp()
    unclipped_BT = -advantages_B1 * ratio_BT
    clipped_BT = -advantages_B1 * ratio_BT.clamp(
        1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    )
    losses_BT = torch.maximum(unclipped_BT, clipped_BT)
    dual_BT = torch.minimum(-advantages_B1 * config.clip_ratio_c, losses_BT)
    return torch.where(advantages_B1 < 0, dual_BT, losses_BT), clipped_BT > unclipped_BT
