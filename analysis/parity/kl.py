"""Claims about mismatch: the mean k3 KL of an arm over that of BF16, its noise floor."""

import numpy as np
import scipy

from analysis.claim_rows import Requirement, new_claim
from analysis.claims_table import Claim, show_ratio
from analysis.results import Array, Results
from analysis.stats import MIN_STEPS, Interval, find_spikes, ratio_over_seeds, token_means
from experiments.rl.metric_names import K3_KL
from experiments.study.schema import Study


def qat_ratio(study: Study, results: Results, model: str) -> Claim:
    """QAT's mismatch is at most so many times BF16's."""
    return _ratio(
        results, model, "nvfp4-qat", "qat_kl_ratio", ("at most", study.claims.qat_kl_ratio)
    )


def noqat_ratio(study: Study, results: Results, model: str) -> Claim:
    """Without QAT it is at least so many times BF16's."""
    required: Requirement = ("at least", study.claims.noqat_kl_ratio)
    return _ratio(results, model, "nvfp4-noqat", "noqat_kl_ratio", required)


def ffn_ratio(study: Study, results: Results, model: str) -> Claim:
    """QAT of the feed-forward layers alone; nothing required."""
    return _ratio(results, model, "nvfp4-qat-ffn", "ffn_kl_ratio", None)


def mean_kl(results: Results, model: str, arm: str, control: str = "bf16") -> tuple[Array, Array]:
    """k3 KL of two arms, each seed's mean over all sampled tokens; infinite where undefined."""
    arm_S, control_S = (
        token_means(np.nan_to_num(kl_ST, nan=np.inf), tokens_ST)
        for kl_ST, tokens_ST in results.weighted_beside(model, arm, control, K3_KL)
    )
    return arm_S, control_S


def kl_ratio(results: Results, model: str, arm: str) -> Interval | None:
    """An arm's mean k3 KL over BF16's in the typical seed.

    A step whose k3 KL the trainer recorded as undefined may have any: exp(d) overflows where the
    policies are far apart, but a fault may be the reason too. So the interval reaches from its
    lower end with 0 in those steps to infinity, and no such step decides a claim.
    """
    (kl_ST, tokens_ST), _ = results.weighted_beside(model, arm, "bf16", K3_KL)
    arm_S, noise_S = mean_kl(results, model, arm)
    interval = ratio_over_seeds(arm_S, noise_S)
    if interval is None or interval.low is None or np.isfinite(kl_ST).all():
        return interval
    least = ratio_over_seeds(token_means(np.nan_to_num(kl_ST, nan=0.0), tokens_ST), noise_S)
    return Interval(np.inf, (least and least.low) or 0.0, np.inf)


def _ratio(
    results: Results, model: str, arm: str, name: str, required: Requirement | None
) -> Claim:
    _, noise_S = mean_kl(results, model, arm)
    if not (np.isfinite(noise_S).all() and noise_S.any()):
        raise ValueError(
            f"{model}: the bf16 arm's {K3_KL} is zero or not finite, so there is no noise floor; "
            "look at its runs' logs"
        )
    kl_ST, noise_ST = results.series_beside(model, arm, "bf16", K3_KL)
    interval, obstacle = kl_ratio(results, model, arm), None
    if interval is None:
        obstacle = "too few tokens for a ratio"
    elif kl_ST.size < MIN_STEPS:
        obstacle = f"{kl_ST.size} steps in all, fewer than {MIN_STEPS}"
    details = [f"steps above 10 medians: {_spikes(kl_ST)}, bf16 {_spikes(noise_ST)}"]
    if undefined := int(np.isnan(kl_ST).sum()):
        details.append(f"undefined in {undefined} of {kl_ST.size} steps, where it may be any")
    if results.was_stopped(model, arm, "bf16"):
        details.append(f"stopped, so of the first {kl_ST.shape[1]} steps")
    return new_claim(
        interval,
        required,
        obstacle,
        model=model,
        name=name,
        statement=f"k3 KL, {arm} / bf16",
        noise_floor=float(scipy.stats.gmean(noise_S)),
        num_seeds=len(noise_S),
        unit="x",
        detail="; ".join(details),
    )


def _spikes(kl_ST: Array) -> str:
    finite_ST = kl_ST[np.isfinite(kl_ST).all(1)]
    found = find_spikes(finite_ST) if len(finite_ST) else None
    if found is None:
        return "not defined"
    size = f" (up to {show_ratio(found.largest)})" if found.count else ""
    return f"{found.count} of {found.steps}{size}"
