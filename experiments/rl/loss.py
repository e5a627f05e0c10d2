"""The loss of GRPO: advantages, DAPO's asymmetric clip, and what is done about other samplers.

Sources: GRPO, arXiv 2402.03300; clip-higher and the token-level mean, DAPO, arXiv 2503.14476; dual
clip, arXiv 1912.09729. Defaults are those of verl's recipe.

Rollouts may come from another policy than the one that is trained. With d = p - q, the log-probs of
the trainer less the rollout's, as in `qat_core.mismatch`, the corrections are:

* token_tis: weight min(exp(d), threshold) a token; https://fengyao.notion.site/off-policy-rl.
* sequence_mask: responses whose ratio exp(-sum d) is outside the band are dropped.
* geometric_mask: the same for the geometric mean exp(-mean d) of a response's tokens. Both as
  `seq_sum_k1` and `seq_mean_k1` in verl 0.9.1, verl/trainer/ppo/rollout_corr_helper.py, with the
  bands of its presets.
* score_centering: no weights; the loss is centred, see `centred_losses`; arXiv 2609.20807.
* none: weight 1.
"""

import math

import torch
from torch import Tensor

from experiments.rl.config import GrpoConfig
from qat_core.mismatch import SAFETY_BOUND, importance_weights


def group_advantages(rewards_B: Tensor, group_size: int) -> Tensor:
    """(r - mean) / (std + 1e-6) within each group of `group_size` neighbours, FP32 (B,).

    0 where all are equal: the mean of eight times 0.1 is not 0.1 in FP32.
    """
    groups = rewards_B.float().view(-1, group_size)
    centred = groups - groups.mean(-1, keepdim=True)
    normalised = centred / (groups.std(-1, keepdim=True) + 1e-6)
    return normalised.masked_fill((groups == groups[:, :1]).all(-1, keepdim=True), 0.0).view(-1)


def advantages(rewards_B: Tensor, config: GrpoConfig) -> Tensor:
    """One advantage a response, FP32 (B,): group-centred, or +1 and -1 for rewards of 1 and 0."""
    if config.advantage == "group":
        return group_advantages(rewards_B, config.responses_per_prompt)
    return 2.0 * rewards_B.float() - 1.0


def policy_losses(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_B1: Tensor, config: GrpoConfig
) -> tuple[Tensor, Tensor]:
    """Clipped policy-gradient losses of every token, (B, T); old log-probs are of before this step.

    And a mask (B, T) of the tokens whose gradient a clip cut off: the upper one where the advantage
    is positive, the lower one where it is negative.
    """
    ratio_BT = (log_probs_BT - old_log_probs_BT).clamp(-20.0, 20.0).exp()
    unclipped_BT = -advantages_B1 * ratio_BT
    clipped_BT = -advantages_B1 * ratio_BT.clamp(
        1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    )
    losses_BT = torch.maximum(unclipped_BT, clipped_BT)
    dual_BT = torch.minimum(-advantages_B1 * config.clip_ratio_c, losses_BT)
    return torch.where(advantages_B1 < 0, dual_BT, losses_BT), clipped_BT > unclipped_BT


def correction_weights(
    train_log_probs_BT: Tensor, rollout_log_probs_BT: Tensor, mask_BT: Tensor, config: GrpoConfig
) -> Tensor:
    """Weight of every token in the loss, FP32 (B, T), 0 off the mask, without gradient."""
    if config.correction == "token_tis":
        threshold = config.rollout_is_threshold
        return importance_weights(train_log_probs_BT, rollout_log_probs_BT, mask_BT, threshold)
    if not config.masks_responses:
        return mask_BT.clone()
    bounded_BT = (train_log_probs_BT - rollout_log_probs_BT).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    log_ratio_B = -(bounded_BT * mask_BT).sum(-1)
    if config.correction == "geometric_mask":
        log_ratio_B = log_ratio_B / mask_BT.sum(-1)
    lowest, highest = map(math.log, config.band)
    kept_B = (log_ratio_B >= lowest) & (log_ratio_B <= highest)
    return mask_BT * kept_B[:, None]


def centred_losses(losses_BT: Tensor, advantages_B1: Tensor, expected_BT: Tensor) -> Tensor:
    """Losses whose gradient is -A (s - E_q[s]) where that of `losses_BT` is -A s.

    s is the gradient of the sampled token's log-prob. Under the sampler q the mean of A s at a
    prefix is E_q[A] E_q[s] + Cov_q(A, s); with p = q the first term is 0, with another q it pulls
    the policy towards q (or, where rewards are low, away from it) at every step. This removes it.
    `expected_BT` is the sum over the vocabulary of q times the trainer's log-prob, with gradient.
    """
    # the value of the added term is no loss, only its gradient counts
    return losses_BT + advantages_B1 * (expected_BT - expected_BT.detach())


def drift_term_metrics(
    advantages_B1: Tensor, score_means_BT: Tensor, mask_BT: Tensor
) -> dict[str, Tensor]:
    """The two factors of the drift term E_q[A] E_q[s], 0-D each.

    `drift_term/advantage` is the mean of A over all tokens: E_q[A] at one prefix is not known, as
    one response was drawn there. `drift_term/score` is the root of the mean of `score_means_BT`,
    the squared norm of E_q[s] at each prefix, taken in the logits, where the score of token a is
    e_a - p and its mean under the sampler q - p.
    """
    num_tokens = mask_BT.sum()
    return {
        "drift_term/advantage": (advantages_B1 * mask_BT).sum() / num_tokens,
        "drift_term/score": ((score_means_BT * mask_BT).sum() / num_tokens).sqrt(),
    }
