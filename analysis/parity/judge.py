"""The claims of a study about mismatch, accuracy, reward and memory, model by model.

Each claim becomes a row with estimate, 95 % interval, threshold and verdict, for every model. A
claim about arms that the study does not have gives no row. docs/protocols/kl-claim.md is the
protocol; claims are not adjusted for their number.
"""

from collections.abc import Callable

from analysis.claim_rows import new_claim
from analysis.claims_table import NOTE, Claim, ClaimsTable
from analysis.judgeable import require_judgeable
from analysis.parity.accuracy import (
    noqat_accuracy,
    noqat_served,
    qat_accuracy,
    qat_served,
    served_beside_rounded,
    served_gain,
)
from analysis.parity.kl import ffn_ratio, noqat_ratio, qat_ratio
from analysis.parity.protocol import marks
from analysis.results import Results, memory_source
from analysis.stats import Interval, gain
from experiments.rl.metric_names import REWARD
from experiments.study.schema import Study

# Reward before and after training: the first step samples from the base model, a few steps average
# out a batch's luck. Few first steps keep the start fair; either side takes half a run at most.
NUM_FIRST_STEPS = 3
NUM_LAST_STEPS = 5


def judge_study(study: Study, results: Results) -> ClaimsTable:
    """All claims of a study, model by model.

    Raises:
        ValueError: the study cannot be judged, a needed metric or evaluation is missing, or the
            noise floor is not finite.
    """
    require_judgeable(study)
    claims = [
        judge(study, results, model)
        for model in study.models
        for arms, judge in CHECKS
        if arms <= set(study.arms)
    ]
    found = {model: marks(study, results, model) for model in study.models}
    note = NOTE.format(temperature=study.evaluation.temperature)
    return ClaimsTable(study=study.study, claims=tuple(claims), marks=found, note=note)


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


Judge = Callable[[Study, Results, str], Claim]
CHECKS: tuple[tuple[set[str], Judge], ...] = (
    ({"bf16"}, _reward_gain),
    ({"bf16", "nvfp4-qat"}, qat_ratio),
    ({"bf16", "nvfp4-noqat"}, noqat_ratio),
    ({"bf16", "nvfp4-qat-ffn"}, ffn_ratio),
    ({"bf16", "nvfp4-qat"}, qat_accuracy),
    ({"bf16", "nvfp4-noqat"}, noqat_accuracy),
    ({"bf16", "nvfp4-qat"}, qat_served),
    ({"bf16", "nvfp4-noqat"}, noqat_served),
    ({"nvfp4-qat", "nvfp4-noqat"}, served_gain),
    ({"bf16", "nvfp4-qat"}, served_beside_rounded),
    (set(), _weight_memory),
)
