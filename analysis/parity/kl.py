"""Claims about mismatch: the mean k3 KL of an arm over that of BF16, its noise floor."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from analysis.claim_rows import Requirement, new_claim
from analysis.claims_table import Claim, show_ratio
from analysis.results import Array, Results
from analysis.stats import (
    MIN_STEPS,
    Interval,
    find_spikes,
    geometric_mean,
    ratio_over_seeds,
    token_means,
)
from experiments.rl.metric_names import K3_KL
from experiments.study.schema import Claims, Study


class Check(NamedTuple):
    """A claim about an arm's k3 KL over BF16's, and what a study's section `claims` requires."""

    name: str
    arm: str
    required: Callable[[Claims], Requirement] | None = None


CHECKS = (
    Check("qat_kl_ratio", "nvfp4-qat", lambda it: ("at most", it.qat_kl_ratio)),
    Check("noqat_kl_ratio", "nvfp4-noqat", lambda it: ("at least", it.noqat_kl_ratio)),
    Check("ffn_kl_ratio", "nvfp4-qat-ffn"),
)


def mean_kl(results: Results, model: str, arm: str) -> tuple[Array, Array]:
    """k3 KL of an arm and of BF16, each seed's mean over all tokens; infinite where undefined."""
    arm_S, control_S = (
        token_means(np.nan_to_num(kl_ST, nan=np.inf), tokens_ST)
        for kl_ST, tokens_ST in results.weighted_beside(model, arm, "bf16", K3_KL)
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


def judge_ratio(check: Check, study: Study, results: Results, model: str) -> Claim:
    """One of CHECKS about a model."""
    name, arm, required = check
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
        required and required(study.claims),
        obstacle,
        model=model,
        name=name,
        statement=f"k3 KL, {arm} / bf16",
        noise_floor=geometric_mean(noise_S),
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
