"""The policy update of one step: mini-batches, micro-batches, one optimizer step a mini-batch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from qat_core.rl.config import GrpoConfig
from qat_core.rl.grpo import group_advantages, policy_losses
from qat_core.rl.mismatch import importance_weights
from qat_core.rl.optimizer import MasterAdamW
from qat_core.rl.policy import Policy
from qat_core.rollout.engine import Rollouts


@torch.no_grad()
def old_log_probs(policy: Policy, rollouts: Rollouts, config: GrpoConfig) -> tuple[Tensor, Tensor]:
    """Log-probs (B, T) of the policy before its update, and the entropies (B, T)."""
    rows = _slices(len(rollouts.input_ids), config.micro_batch_responses)
    parts = [policy.log_probs(rollouts.select(row)) for row in rows]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


def update_policy(
    policy: Policy,
    optimizer: MasterAdamW,
    rollouts: Rollouts,
    old_log_probs_BT: Tensor,
    scores_B: Tensor,
    config: GrpoConfig,
) -> dict[str, float]:
    """Updates the policy; returns the `actor/*` metrics, means over the mini-batches.

    `actor/grad_norm` is infinite or NaN if the optimizer skipped one of them.
    """
    advantages_B1 = group_advantages(scores_B, config.responses_per_prompt)[:, None]
    weights_BT = importance_weights(
        old_log_probs_BT, rollouts.log_probs, rollouts.response_mask, config.rollout_is_threshold
    )
    size = config.mini_batch_prompts * config.responses_per_prompt
    steps: list[dict[str, float]] = []
    for mini in _slices(len(scores_B), size):
        num_tokens = rollouts.response_mask[mini].sum()
        totals = torch.zeros(3)
        for rows in _slices(mini.stop, config.micro_batch_responses, mini.start):
            totals += _backward(
                policy,
                rollouts.select(rows),
                old_log_probs_BT[rows],
                advantages_B1[rows],
                weights_BT[rows],
                num_tokens,
                config,
            )
            optimizer.accumulate()
        names = ("actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl")
        steps.append(dict(zip(names, totals.tolist(), strict=True)))
        steps[-1]["actor/grad_norm"] = optimizer.step(config.grad_clip)
    means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    return {**means, "actor/lr": config.lr}


def _backward(
    policy: Policy,
    rollouts: Rollouts,
    old_log_probs_BT: Tensor,
    advantages_B1: Tensor,
    weights_BT: Tensor,
    num_tokens: Tensor,
    config: GrpoConfig,
) -> Tensor:
    """Adds a micro-batch's gradient; returns its share of loss, clip fraction and KL, (3,)."""
    log_probs_BT, _ = policy.log_probs(rollouts)
    losses_BT, clipped_BT = policy_losses(log_probs_BT, old_log_probs_BT, advantages_B1, config)
    mask_BT = rollouts.response_mask / num_tokens
    loss = (losses_BT * weights_BT * mask_BT).sum()
    torch.autograd.backward(loss)
    drift_BT = old_log_probs_BT - log_probs_BT.detach()
    shares = (loss.detach(), (clipped_BT * mask_BT).sum(), (drift_BT * mask_BT).sum())
    return torch.stack(shares).cpu()


def _slices(stop: int, size: int, start: int = 0) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
