"""The policy update of one step: mini-batches, micro-batches, one optimizer step a mini-batch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from experiments.rl.config import GrpoConfig
from experiments.rl.loss import centred_losses, correction_weights, policy_losses
from experiments.rl.optimizer import MasterAdamW
from experiments.rl.policy import Policy, Scores
from qat_core.rollout.engine import Rollouts


def needs_old_scores(config: GrpoConfig) -> bool:
    """Whether the policy has to score all rollouts before the first update.

    With one update a batch, its own forward passes say the same. A mask has to be known for all
    responses before the first backward pass, as the loss is a mean over what it keeps.
    """
    return not config.is_on_policy or config.masks_responses


@torch.no_grad()
def old_scores(policy: Policy, rollouts: Rollouts, config: GrpoConfig) -> Scores:
    """Scores by the policy before its update."""
    rows = _slices(len(rollouts.input_ids), config.micro_batch_responses)
    return Scores.joined([policy.scores(rollouts.select(row)) for row in rows])


def update_policy(
    policy: Policy,
    optimizer: MasterAdamW,
    rollouts: Rollouts,
    old: Scores | None,
    advantages_B1: Tensor,
    config: GrpoConfig,
) -> tuple[dict[str, float], Scores]:
    """Updates the policy; `old` is None where `needs_old_scores` says so.

    Returns the `actor/*` metrics, means over the mini-batches, and the scores by the policy before
    the update. `actor/grad_norm` is infinite or NaN if the optimizer skipped a mini-batch.
    """
    size = config.mini_batch_prompts * config.responses_per_prompt
    mask_BT = rollouts.response_mask
    if old is not None and config.masks_responses:
        weights_BT = correction_weights(old.log_probs_BT, rollouts.log_probs, mask_BT, config)
        mask_BT = weights_BT
    steps: list[dict[str, float]] = []
    seen: list[Scores] = []
    for mini in _slices(len(advantages_B1), size):
        num_tokens = mask_BT[mini].sum().clamp(min=1.0)
        totals = torch.zeros(3, device=mask_BT.device)
        for rows in _slices(mini.stop, config.micro_batch_responses, mini.start):
            shares, scores = _backward(
                policy,
                rollouts.select(rows),
                None if old is None else old.log_probs_BT[rows],
                advantages_B1[rows],
                num_tokens,
                config,
            )
            totals += shares
            seen.append(scores)
            optimizer.accumulate()
        names = ("actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl")
        steps.append(dict(zip(names, totals.tolist(), strict=True)))
        steps[-1]["actor/grad_norm"] = optimizer.step(config.grad_clip)
    means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    return {**means, "actor/lr": config.lr}, old or Scores.joined(seen)


def _backward(
    policy: Policy,
    rollouts: Rollouts,
    old_log_probs_BT: Tensor | None,
    advantages_B1: Tensor,
    num_tokens: Tensor,
    config: GrpoConfig,
) -> tuple[Tensor, Scores]:
    """Adds a gradient; returns shares of loss, clip fraction and KL, (3,), and detached scores."""
    scores = policy.scores(rollouts)
    current_BT = scores.log_probs_BT
    old_BT = current_BT.detach() if old_log_probs_BT is None else old_log_probs_BT
    losses_BT, clipped_BT = policy_losses(current_BT, old_BT, advantages_B1, config)
    if config.correction == "score_centering":
        assert scores.expected_BT is not None
        losses_BT = centred_losses(losses_BT, advantages_B1, scores.expected_BT)
    weights_BT = correction_weights(old_BT, rollouts.log_probs, rollouts.response_mask, config)
    mask_BT = rollouts.response_mask / num_tokens
    loss = (losses_BT * weights_BT * mask_BT).sum()
    torch.autograd.backward(loss)
    drift_BT = old_BT - current_BT.detach()
    kept_BT = mask_BT * (weights_BT != 0)  # what a mask left out is not among `num_tokens` either
    shares = (loss.detach(), (clipped_BT * kept_BT).sum(), (drift_BT * kept_BT).sum())
    return torch.stack(shares), scores.detached()


def _slices(stop: int, size: int, start: int = 0) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
