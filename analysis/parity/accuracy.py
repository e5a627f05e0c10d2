"""Claims about accuracy on held-out prompts, as differences of arms in log-odds.

Answers are sampled, at temperature 0.6 unless the study says another
(`experiments.rl.config.EvaluationConfig`). `accuracy` compares checkpoints, all evaluated in BF16;
`served` compares what a user gets: NVFP4 arms evaluated in NVFP4.
"""

from collections.abc import Callable
from typing import NamedTuple

from analysis.claim_rows import Requirement, new_claim
from analysis.claims_table import Claim
from analysis.results import Array, Results
from analysis.stats import Interval, log_odds, over_seeds
from experiments.study.schema import Claims, Study

PRECISIONS = {"bf16": "BF16", "nvfp4": "NVFP4"}


class Served(NamedTuple):
    """An arm and the precision that its checkpoints are evaluated in."""

    arm: str
    precision: str

    def __str__(self) -> str:
        return f"{self.arm} in {PRECISIONS[self.precision]}"


class Difference(NamedTuple):
    """Two arms compared: by seed, over seeds, and either arm's accuracy by seed."""

    seeds_S: Array
    interval: Interval
    arm_S: Array
    control_S: Array


BF16 = Served("bf16", "bf16")
QAT, NOQAT = "nvfp4-qat", "nvfp4-noqat"


class Check(NamedTuple):
    """A claim about two arms, and what a study's section `claims` requires of it."""

    name: str
    arm: Served
    control: Served
    required: Callable[[Claims], Requirement] | None = None


CHECKS = (
    Check(
        "accuracy_log_odds", Served(QAT, "bf16"), BF16, lambda it: ("within", it.accuracy_log_odds)
    ),
    Check("noqat_accuracy", Served(NOQAT, "bf16"), BF16),
    Check(
        "served_log_odds", Served(QAT, "nvfp4"), BF16, lambda it: ("at least", -it.served_log_odds)
    ),
    Check("noqat_served", Served(NOQAT, "nvfp4"), BF16),
    Check(
        "served_gain", Served(QAT, "nvfp4"), Served(NOQAT, "nvfp4"), lambda it: ("at least", 0.0)
    ),
    # the plainest rival: a checkpoint of BF16, rounded after training
    Check("served_beside_rounded", Served(QAT, "nvfp4"), Served(BF16.arm, "nvfp4")),
)


def difference(results: Results, model: str, step: int, arm: Served, control: Served) -> Difference:
    """Difference of two arms in log-odds, seed by seed."""
    correct = [answers(results, model, it, step) for it in (arm, control)]
    (arm_S, num_answers), (control_S, control_answers) = correct
    if num_answers != control_answers:
        raise ValueError(
            f"{model}: {arm.arm} and {control.arm} have different test prompts; evaluate again"
        )
    difference_S = log_odds(arm_S, num_answers) - log_odds(control_S, num_answers)
    return Difference(
        difference_S, over_seeds(difference_S), arm_S / num_answers, control_S / num_answers
    )


def answers(results: Results, model: str, served: Served, step: int) -> tuple[Array, int]:
    """Correct sampled answers by seed after a step, and how many answers each seed gave."""
    correct_SP, samples = results.correct_answers(model, served.arm, step, served.precision)
    return correct_SP.sum(1), correct_SP.shape[1] * samples


def mean_accuracy(results: Results, model: str, served: Served, step: int) -> float:
    """Share of right sampled answers after a step, over all seeds."""
    correct_S, num_answers = answers(results, model, served, step)
    return float(correct_S.mean() / num_answers)


def accuracy_of_bf16(results: Results, model: str) -> float:
    """That of BF16 after its last evaluated step."""
    return mean_accuracy(results, model, BF16, results.last_evaluated(model, BF16.arm))


def judge_accuracy(check: Check, study: Study, results: Results, model: str) -> Claim:
    """One of CHECKS about a model."""
    _, arm, control, required = check
    step = results.last_evaluated(model, arm.arm, control.arm)
    _, interval, arm_S, control_S = difference(results, model, step, arm, control)
    base = mean_accuracy(results, model, control, 0)
    kind = "accuracy" if arm.precision == "bf16" else "served"
    both = " (both NVFP4)" if control == Served(BF16.arm, "nvfp4") else ""
    when = f", both after step {step} of {study.rl.steps}" if step < study.rl.steps else ""
    return new_claim(
        interval,
        required and required(study.claims),
        model=model,
        name=check.name,
        statement=f"{kind}, {arm.arm} - {control.arm}{both}",
        num_seeds=len(arm_S),
        unit="log-odds",
        detail=f"{arm} {arm_S.mean():.3f}, {control} {control_S.mean():.3f}, base model "
        f"{base:.3f}; sampled{when}",
    )
