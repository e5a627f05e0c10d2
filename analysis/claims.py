"""Judges a study's claims: `python -m analysis.claims --study FILE --results DIR --out DIR`.

Each claim becomes a row with estimate, 95 % interval, threshold and verdict, for every model. A
claim about arms that the study does not have gives no row.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from analysis.claims_table import Claim, ClaimsTable, show_ratio
from analysis.load import load_results
from analysis.results import Array, Results, memory_source
from analysis.stats import (
    MIN_STEPS,
    Interval,
    Verdict,
    gain,
    interquartile_mean,
    paired_difference,
    ratio,
    seeded_generator,
)
from experiments.study.load import load_study
from experiments.study.schema import Study
from experiments.support.cli import STUDY, run_cli
from qat_core.rl.metric_names import K3_KL, REWARD

# Reward before and after training: the first step samples from the base model, a few steps average
# out a batch's luck. Few first steps keep the start fair; either side takes half a run at most.
NUM_FIRST_STEPS = 3
NUM_LAST_STEPS = 5

# How a threshold binds, and its value; "within" means between -value and value.
Requirement = tuple[Literal["at least", "at most", "within"], float]


def judge_study(study: Study, results: Results) -> ClaimsTable:
    """All claims of a study, model by model.

    Raises:
        ValueError: a needed metric or evaluation is missing, or the noise floor is not finite.
    """
    claims = [
        judge(study, results, model)
        for model in study.models
        for arms, judge in CHECKS
        if arms <= set(study.arms)
    ]
    return ClaimsTable(study=study.study, claims=tuple(claims))


def _reward_gain(study: Study, results: Results, model: str) -> Claim:
    reward_ST = results.series(model, "bf16", REWARD)
    num_seeds, num_steps = reward_ST.shape
    if num_steps < 2:
        raise ValueError(f"{model}: one step has no reward gain; set rl.steps to 2 or more")
    num_first, num_last = min(NUM_FIRST_STEPS, num_steps // 2), min(NUM_LAST_STEPS, num_steps // 2)
    first, last = reward_ST[:, :num_first].mean(), reward_ST[:, -num_last:].mean()
    return _claim(
        gain(reward_ST, num_first, num_last, seeded_generator()),
        ("at least", study.claims.reward_gain),
        _too_few_steps(reward_ST),
        model=model,
        name="reward_gain",
        statement="reward gain of bf16",
        num_seeds=num_seeds,
        unit="",
        detail=f"{first:.3f} to {last:.3f}: first {num_first}, last {num_last} steps",
    )


def _qat_ratio(study: Study, results: Results, model: str) -> Claim:
    required: Requirement = ("at most", study.claims.qat_kl_ratio)
    return _kl_ratio(results, model, "nvfp4-qat", "qat_kl_ratio", required)


def _noqat_ratio(study: Study, results: Results, model: str) -> Claim:
    required: Requirement = ("at least", study.claims.noqat_kl_ratio)
    return _kl_ratio(results, model, "nvfp4-noqat", "noqat_kl_ratio", required)


def _ffn_ratio(study: Study, results: Results, model: str) -> Claim:
    return _kl_ratio(results, model, "nvfp4-qat-ffn", "ffn_kl_ratio", None)


def _kl_ratio(
    results: Results, model: str, arm: str, name: str, required: Requirement | None
) -> Claim:
    kl_ST, noise_ST = results.series_beside(model, arm, "bf16", K3_KL)
    if not (np.isfinite(noise_ST).all() and noise_ST.mean() > 0):
        raise ValueError(
            f"{model}: the bf16 arm's {K3_KL} is zero or not finite, so there is no noise floor; "
            "look at its runs' logs"
        )
    # exp(d) overflows where the policies are far apart; the trainer records that as undefined
    kl_ST = np.nan_to_num(kl_ST, nan=np.inf)
    # of the typical step: in an MoE a few rerouted tokens decide the mean, in BF16 too
    typical = ratio(kl_ST, noise_ST, seeded_generator(), interquartile_mean)
    details, obstacle = [], _too_few_steps(kl_ST)
    if typical is None:
        obstacle = "too few tokens for a ratio"
    elif (of_means := ratio(kl_ST, noise_ST, seeded_generator())) is not None:
        estimate, low, high = map(show_ratio, (of_means.estimate, of_means.low, of_means.high))
        details.append(f"plain means: {estimate}, {low} to {high}")
    if results.was_stopped(model, arm, "bf16"):
        details.append(f"stopped, so of the first {kl_ST.shape[1]} steps")
    return _claim(
        typical,
        required,
        obstacle,
        model=model,
        name=name,
        statement=f"k3 KL, {arm} / bf16",
        noise_floor=float(interquartile_mean(noise_ST)),
        num_seeds=len(noise_ST),
        unit="x",
        detail="; ".join(details),
    )


def _qat_accuracy(study: Study, results: Results, model: str) -> Claim:
    required: Requirement = ("within", study.claims.accuracy_margin)
    return _accuracy(study, results, model, "nvfp4-qat", "accuracy_margin", required)


def _noqat_accuracy(study: Study, results: Results, model: str) -> Claim:
    return _accuracy(study, results, model, "nvfp4-noqat", "noqat_accuracy", None)


def _accuracy(
    study: Study, results: Results, model: str, arm: str, name: str, required: Requirement | None
) -> Claim:
    step = results.last_evaluated(model, arm, "bf16")
    arm_SP = results.success_rates(model, arm, step, "bf16", "sampled")
    control_SP = results.success_rates(model, "bf16", step, "bf16", "sampled")
    if arm_SP.shape != control_SP.shape:
        raise ValueError(f"{model}: {arm} and bf16 have different test prompts; evaluate again")
    num_seeds, num_prompts = arm_SP.shape
    means = f"{arm_SP.mean():.3f} less {control_SP.mean():.3f}"
    when = f", both after step {step} of {study.rl.steps}" if step < study.rl.steps else ""
    return _claim(
        paired_difference(arm_SP, control_SP, seeded_generator()),
        required,
        model=model,
        name=name,
        statement=f"accuracy, {arm} less bf16",
        num_seeds=num_seeds,
        unit="",
        detail=f"offline, in BF16, {num_prompts} prompts: {means}{when}",
    )


def _weight_memory(study: Study, results: Results, model: str) -> Claim:
    memories = [run.memory for run in results.manifests.values() if run.model == model]
    error = max(abs(it.predicted_gib / it.measured_gib - 1) for it in memories)
    smallest = min(memories, key=lambda memory: memory.measured_gib)
    return _claim(
        Interval(error, error, error),
        ("at most", study.claims.weight_memory_error),
        model=model,
        name="weight_memory_error",
        statement="weight memory, prediction error",
        num_seeds=len(study.seeds),
        unit="%",
        exact=True,
        detail=f"packed weights: {smallest.share_of_bf16:.1%} of BF16's, {memory_source(study)}",
    )


Judge = Callable[[Study, Results, str], Claim]
CHECKS: tuple[tuple[set[str], Judge], ...] = (
    ({"bf16"}, _reward_gain),
    ({"bf16", "nvfp4-qat"}, _qat_ratio),
    ({"bf16", "nvfp4-noqat"}, _noqat_ratio),
    ({"bf16", "nvfp4-qat-ffn"}, _ffn_ratio),
    ({"bf16", "nvfp4-qat"}, _qat_accuracy),
    ({"bf16", "nvfp4-noqat"}, _noqat_accuracy),
    (set(), _weight_memory),
)


def _too_few_steps(values_ST: Array) -> str | None:
    return "too few steps for a verdict" if values_ST.size < MIN_STEPS else None


def _claim(
    interval: Interval | None,
    required: Requirement | None,
    obstacle: str | None = None,
    *,
    detail: str,
    **described: Any,
) -> Claim:
    """A row; `obstacle` says what keeps its interval from deciding anything."""
    bound, threshold = required or (None, None)
    verdict: Literal[Verdict, "REPORTED"] = "INCONCLUSIVE" if required else "REPORTED"
    if required and interval and obstacle is None:
        verdict = _judge(interval, *required)
    return Claim(
        estimate=interval and interval.estimate,
        low=interval and interval.low,
        high=interval and interval.high,
        bound=bound,
        threshold=threshold,
        verdict=verdict,
        detail="; ".join(filter(None, (detail, obstacle))),
        **described,
    )


def _judge(interval: Interval, bound: str, threshold: float) -> Verdict:
    low = {"at least": threshold, "at most": -np.inf, "within": -threshold}[bound]
    return interval.judge(low, np.inf if bound == "at least" else threshold)


def main() -> None:
    """Writes claims.json and claims.md, and prints the table."""
    parser = argparse.ArgumentParser(description="Judge a study's claims.", parents=[STUDY])
    parser.add_argument("--results", type=Path, required=True, help="results or records folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of claims.json, claims.md")
    arguments = parser.parse_args()
    study = load_study(arguments.study)
    table = judge_study(study, load_results(arguments.results, [run.id for run in study.runs]))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "claims.json").write_text(table.model_dump_json(indent=2) + "\n")
    (arguments.out / "claims.md").write_text(table.to_markdown())
    table.show(Console())


if __name__ == "__main__":
    run_cli(main)
