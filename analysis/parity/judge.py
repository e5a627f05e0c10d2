"""The claims of a study about mismatch, accuracy, reward and memory, model by model.

Each claim becomes a row with estimate, 95 % interval, threshold and verdict, for every model. A
claim about arms that the study does not have gives no row. docs/protocols/kl-claim.md is the
protocol; claims are not adjusted for their number.
"""

from collections.abc import Iterator

import numpy as np

from analysis.claim_rows import new_claim
from analysis.claims_table import NOTE, Claim, ClaimsTable
from analysis.judgeable import require_judgeable
from analysis.parity import accuracy, kl
from analysis.parity.accuracy import BF16
from analysis.parity.protocol import marks
from analysis.results import Results, memory_source
from analysis.stats import Interval, gain
from experiments.rl.metric_names import MISMATCH_COUNT, REWARD
from experiments.study.schema import Study

# Reward before and after training: the first step samples from the base model, a few steps average
# out a batch's luck. Few first steps keep the start fair; either side takes half a run at most.
NUM_FIRST_STEPS = 3
NUM_LAST_STEPS = 5


def judge_study(study: Study, results: Results) -> ClaimsTable:
    """All claims of a study, model by model."""
    require_judgeable(study)
    claims = [claim for model in study.models for claim in _claims(study, results, model)]
    found = {model: marks(study, results, model) for model in study.models}
    note = NOTE.format(temperature=study.evaluation.temperature)
    return ClaimsTable(study=study.study, claims=tuple(claims), marks=found, note=note)


def _claims(study: Study, results: Results, model: str) -> Iterator[Claim]:
    arms = set(study.arms)
    if BF16.arm in arms:
        yield _reward_gain(study, results, model)
    for ratio in kl.CHECKS:
        if {ratio.arm, BF16.arm} <= arms:
            yield kl.judge_ratio(ratio, study, results, model)
    for arm in study.arms:
        if study.is_exact(arm):
            yield _unequal_log_probs(results, model, arm)
    for check in accuracy.CHECKS:
        if {check.arm.arm, check.control.arm} <= arms:
            yield accuracy.judge_accuracy(check, study, results, model)
    yield _weight_memory(study, results, model)


def _reward_gain(study: Study, results: Results, model: str) -> Claim:
    reward_ST = results.series(model, "bf16", REWARD)
    num_seeds, num_steps = reward_ST.shape
    if num_steps < 2:
        raise ValueError(f"{model}: one step has no reward gain; set rl.steps to 2 or more")
    num_first, num_last = min(NUM_FIRST_STEPS, num_steps // 2), min(NUM_LAST_STEPS, num_steps // 2)
    first, last = reward_ST[:, :num_first].mean(), reward_ST[:, -num_last:].mean()
    return new_claim(
        gain(reward_ST, num_first, num_last),
        ("at least", study.claims.reward_gain),
        model=model,
        name="reward_gain",
        statement="reward gain of bf16",
        num_seeds=num_seeds,
        unit="",
        detail=f"{first:.3f} to {last:.3f}: first {num_first}, last {num_last} steps",
    )


def _unequal_log_probs(results: Results, model: str, arm: str) -> Claim:
    count_ST = results.series(model, arm, MISMATCH_COUNT)
    count = float(count_ST.sum())
    return new_claim(
        Interval(count, count, count) if np.isfinite(count) else None,
        ("at most", 0),
        model=model,
        name="unequal_log_probs",
        statement=f"log-probs that differ, {arm}",
        num_seeds=len(count_ST),
        unit="count",
        exact=True,
        detail=f"of sampled tokens, in any bit, over {count_ST.size} steps",
    )


def _weight_memory(study: Study, results: Results, model: str) -> Claim:
    memories = [run.memory for run in results.manifests.values() if run.model == model]
    error = max(abs(it.predicted_gib / it.measured_gib - 1) for it in memories)
    smallest = min(memories, key=lambda memory: memory.measured_gib)
    share, bf16 = "", results.memory_of(model, "bf16")
    if bf16 and smallest.measured_packed_gib is not None:
        share = f"packed weights: {smallest.measured_gib / bf16.measured_gib:.1%} of BF16's, "
    # what is streamed says how well shapes are predicted, not what an engine holds
    is_of_engine = study.measures_engine
    return new_claim(
        Interval(error, error, error),
        ("at most", study.claims.weight_memory_error) if is_of_engine else None,
        model=model,
        name="weight_memory_error",
        statement="weight memory error" if is_of_engine else "weight stream error",
        num_seeds=len(study.seeds),
        unit="%",
        exact=True,
        detail=f"predicted from shapes; {share}{memory_source(study, memories)}",
    )
