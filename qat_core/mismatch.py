"""How far the rollout policy is from the trained one: verl's `rollout_corr/*` metrics.

Notation, for response tokens t of sequence i with mask m: p = log-prob in the trainer, q = log-prob
when sampled, d = p - q. E_tok is the mean over all masked tokens, mean_i that over sequences.
Formulas as in verl 0.9.1, verl/trainer/ppo/rollout_corr_helper.py; the two percentiles are ours.
"""

import torch
from torch import Tensor

PREFIX = "rollout_corr/"  # of verl's names
SAFETY_BOUND = 20.0
_EPSILON = 1e-8


def k3(log_ratio: Tensor) -> Tensor:
    """What each token adds to the k3 KL (Schulman 2020), in nats: exp(d) - 1 - d, FP64.

    Args:
        log_ratio: d = log p_train - log q_rollout of sampled tokens, or of any two models.
    """
    wide = log_ratio.double()
    return torch.expm1(wide) - wide  # exp(d) - 1 would cancel to noise where d is small


def masked_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """E_tok: mean over the masked tokens of the whole batch, a 0-D tensor."""
    return (values_BT * mask_BT).sum() / (mask_BT.sum() + _EPSILON)


def importance_weights(
    train_log_probs_BT: Tensor, rollout_log_probs_BT: Tensor, mask_BT: Tensor, threshold: float
) -> Tensor:
    """Token-level truncated importance weights min(exp(d), threshold), (B, T), 0 off the mask."""
    log_ratio_BT = train_log_probs_BT - rollout_log_probs_BT
    ratio_BT = log_ratio_BT.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp() * mask_BT
    return ratio_BT.clamp(max=threshold)


def mismatch_metrics(
    train_log_probs_BT: Tensor, rollout_log_probs_BT: Tensor, mask_BT: Tensor, threshold: float
) -> dict[str, float]:
    """All mismatch metrics of a batch.

    Args:
        train_log_probs_BT: trainer's log-probs of the sampled tokens, FP32 (B, T).
        rollout_log_probs_BT: rollout engine's, FP32 (B, T).
        mask_BT: 1.0 on response tokens, else 0.0; every row has one at least.
        threshold: cap C of the token-level importance weights.

    Returns:
        verl's metric names with the prefix `rollout_corr/`, as Python floats.
    """
    mask_BT = mask_BT.float()
    log_ratio_BT = (train_log_probs_BT - rollout_log_probs_BT) * mask_BT
    metrics = {
        **_perplexities(train_log_probs_BT, rollout_log_probs_BT, mask_BT),
        **_divergences(log_ratio_BT, mask_BT),
        **_importance_statistics(log_ratio_BT, mask_BT, threshold),
    }
    return as_floats({f"{PREFIX}{name}": value for name, value in metrics.items()})


def as_floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """0-D tensors as Python floats, with one wait for the device."""
    values = torch.stack([value.double() for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


def _perplexities(
    train_log_probs_BT: Tensor, rollout_log_probs_BT: Tensor, mask_BT: Tensor
) -> dict[str, Tensor]:
    lengths_B = mask_BT.sum(-1)
    assert bool((lengths_B > 0).all()), "a response without tokens"
    train_log_ppl_B = -(train_log_probs_BT * mask_BT).sum(-1) / lengths_B
    rollout_log_ppl_B = -(rollout_log_probs_BT * mask_BT).sum(-1) / lengths_B
    difference_B = train_log_ppl_B - rollout_log_ppl_B
    return {
        "training_ppl": train_log_ppl_B.exp().mean(),
        "training_log_ppl": train_log_ppl_B.mean(),
        "rollout_ppl": rollout_log_ppl_B.exp().mean(),
        "rollout_log_ppl": rollout_log_ppl_B.mean(),
        "log_ppl_diff": difference_B.mean(),
        "log_ppl_abs_diff": difference_B.abs().mean(),
        "log_ppl_diff_max": difference_B.max(),
        "log_ppl_diff_min": difference_B.min(),
        "ppl_ratio": difference_B.exp().mean(),
    }


def _divergences(log_ratio_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    bounded_BT = log_ratio_BT.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    bounded_sum_B = log_ratio_BT.sum(-1).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    abs_tokens = log_ratio_BT[mask_BT > 0].abs()
    return {
        "kl": masked_mean(-log_ratio_BT, mask_BT),
        "k3_kl": masked_mean(k3(log_ratio_BT), mask_BT),
        "chi2_token": masked_mean(bounded_BT.exp().square(), mask_BT) - 1,
        "chi2_seq": (2 * bounded_sum_B).exp().mean() - 1,
        "abs_diff_p50": abs_tokens.quantile(0.5),
        "abs_diff_p99": abs_tokens.quantile(0.99),
    }


def _importance_statistics(
    log_ratio_BT: Tensor, mask_BT: Tensor, threshold: float
) -> dict[str, Tensor]:
    ratio_BT = log_ratio_BT.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()
    weight_BT = ratio_BT.clamp(max=threshold)
    applied = weight_BT[mask_BT > 0]
    mean = masked_mean(weight_BT, mask_BT)
    variance = masked_mean(weight_BT.square(), mask_BT) - mean.square()
    weight_B = (weight_BT * mask_BT).sum(-1) / mask_BT.sum(-1)
    ratio_B = (ratio_BT * mask_BT).sum(-1) / mask_BT.sum(-1)
    return {
        "rollout_is_mean": mean,
        "rollout_is_max": applied.max(),
        "rollout_is_min": applied.min(),
        "rollout_is_std": variance.clamp(min=0).sqrt(),
        "rollout_is_ratio_fraction_high": masked_mean((ratio_BT > threshold).float(), mask_BT),
        "rollout_is_ratio_fraction_low": masked_mean((ratio_BT < 1 / threshold).float(), mask_BT),
        "rollout_is_eff_sample_size": 1
        / masked_mean((weight_BT / (mean + _EPSILON)).square(), mask_BT),
        "rollout_is_seq_mean": weight_B.mean(),
        "rollout_is_seq_std": weight_B.std(correction=min(1, len(weight_B) - 1)),
        "rollout_is_seq_max": weight_B.max(),
        "rollout_is_seq_min": weight_B.min(),
        "rollout_is_seq_max_deviation": (weight_B - 1).abs().max(),
        "rollout_is_seq_fraction_high": (ratio_B > threshold).float().mean(),
        "rollout_is_seq_fraction_low": (ratio_B < 1 / threshold).float().mean(),
    }
