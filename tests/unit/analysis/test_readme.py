"""Numbers in sentences of README and results are of the records; tables are made from them."""

import json
import re
from functools import partial
from statistics import fmean

import pytest
from scipy.stats import fisher_exact

from analysis.claims_table import Claim, ClaimsTable, read_table, show_ratio
from analysis.collapse.outcome_table import last_accuracies, read_evaluated
from experiments.rl.tasks import have_new_sums
from experiments.runs.attempts import list_run_dirs
from experiments.runs.evaluation import Precision
from experiments.study.load import load_study
from tests.unit.analysis.readme import COUNTS, RECORDS, RESULTS, TEXT


def last_answers(
    record: str,
    arm: str,
    cell: str,
    precision: Precision,
    *,
    num_seeds: int = 10,
    of_new_sums: bool = False,
) -> str:
    """Mean accuracy of all seeds' last checkpoints, of sampled answers, as README rounds it."""
    study = load_study(RECORDS / record / "study.yaml")
    runs = [run for run in study.runs if (run.arm, run.cell) == (arm, cell)]
    among = have_new_sums(study.task)[: study.evaluation.prompts] if of_new_sums else []
    shares = last_accuracies(read_evaluated(study, RECORDS / record, runs), precision, among)
    assert len(shares) == len(runs) == num_seeds
    return f"{fmean(shares):.2f}"


def read_claims(record: str) -> ClaimsTable:
    return read_table(RECORDS / record / "claims.json")


def without_signs(claim: Claim) -> tuple[str, str, str]:
    """A negative estimate and its interval, the lower end first, as README says it in words."""
    assert claim.estimate is not None and claim.low is not None and claim.high is not None
    assert max(claim.estimate, claim.low, claim.high) < 0
    return f"{-claim.estimate:.3f}", f"{-claim.low:.3f}", f"{-claim.high:.3f}"


def collapsed_seeds(record: str, setting: str, num_seeds: int) -> set[str]:
    """Of an arm and its cell, such as bf16.lr2e-4, of which a record has so many runs."""
    named = [it for it in list_run_dirs(RECORDS / record) if f"_{setting}_seed" in it.name]
    assert len(named) == num_seeds
    runs = (run.split(f"_{setting}_seed") for run in read_claims(record).collapsed_at)
    return {parts[1] for parts in runs if len(parts) == 2}


def test_collapses_of_ten_seeds() -> None:
    table = read_claims("collapse-confirm")
    noqat, qat, bf16, tis = (
        COUNTS[len(collapsed_seeds("collapse-confirm", setting, 10))]
        for setting in (
            "nvfp4-noqat.lr2e-4",
            "nvfp4-qat.lr2e-4",
            "bf16.lr2e-4",
            "nvfp4-noqat.lr2e-4-tis",
        )
    )
    assert (
        f"without QAT {noqat} of ten runs collapse within 240 steps, with QAT {qat} of ten, "
        f"in BF16 {bf16} of ten"
    ) in TEXT
    assert f"Token TIS is ahead of QAT in collapses ({tis}, QAT {qat})" in RESULTS
    assert f"The {qat} runs with QAT collapse while their k3 KL is of BF16's size" in RESULTS
    detail = next(it.detail for it in table.claims if it.name == "C1")
    to_qat, to_bf16 = (
        f"{float(p):.5f}".rstrip("0") for p in re.findall(r"corrected (\S+?)(?:;|$)", detail)
    )
    assert f"(p = {to_qat} against QAT, {to_bf16} against BF16, corrected" in TEXT


def test_collapses_of_45_new_seeds() -> None:
    claims = {it.name: it for it in read_claims("collapse-safety").claims}
    verdicts = {name: it.verdict for name, it in claims.items()}
    assert (verdicts["C4"], verdicts["C10"], verdicts["C11"]) == (
        "INCONCLUSIVE",
        "FAIL",
        "INCONCLUSIVE",
    )
    qat, bf16, tis = (
        collapsed_seeds("collapse-safety", setting, 45)
        for setting in ("nvfp4-qat.lr2e-4", "bf16.lr2e-4", "nvfp4-noqat.lr2e-4-tis")
    )
    assert f"{COUNTS[len(qat & bf16)].capitalize()} seeds collapse in both" in RESULTS
    c10 = claims["C10"]
    assert c10.estimate is not None and c10.low is not None and c10.high is not None
    assert f"does as well as QAT: {len(tis)} of the 45, mean reward {-c10.estimate:.3f}" in TEXT
    assert f"({-c10.low:.3f} lower to {c10.high:.3f} higher)" in TEXT


def test_collapses_and_rewards_of_72_new_seeds() -> None:
    claims = {it.name: it for it in read_claims("collapse-safety-again").claims}
    assert (claims["C4"].verdict, claims["C11"].verdict) == ("PASS", "INCONCLUSIVE")
    qat, bf16 = (
        collapsed_seeds("collapse-safety-again", f"{arm}.lr2e-4", 72)
        for arm in ("nvfp4-qat", "bf16")
    )
    qat_before, bf16_before = (
        collapsed_seeds("collapse-safety", f"{arm}.lr2e-4", 45) for arm in ("nvfp4-qat", "bf16")
    )
    c4 = claims["C4"]
    assert c4.estimate is not None and c4.low is not None and c4.high is not None
    assert f"QAT's mean reward is {-c4.estimate:.3f} below BF16's" in TEXT
    assert f"(90 % interval {-c4.low:.3f} below to {c4.high:.3f} above), within" in TEXT
    assert (
        f"adds collapses is open: {len(qat)} of 72 with it, {len(bf16)} in BF16 "
        f"({len(qat_before)} and {len(bf16_before)} of the 45)"
    ) in TEXT
    both = len(qat & bf16)
    assert (
        f"{len(qat)} of 72 runs collapse with QAT, {len(bf16)} in BF16, {COUNTS[both]} see"
        in RESULTS
    )
    assert (
        f"it is {len(qat | qat_before)} of 117 against {len(bf16 | bf16_before)} of 117" in RESULTS
    )
    counts = [[len(bf16_before), 45 - len(bf16_before)], [len(bf16), 72 - len(bf16)]]
    assert f"(p = {fisher_exact(counts).pvalue:.2f}, Fisher's exact test" in RESULTS
    answers = partial(last_answers, "collapse-safety-again", precision="bf16", num_seeds=72)
    of_qat, of_bf16 = answers("nvfp4-qat", "lr2e-4"), answers("bf16", "lr2e-4")
    assert f"answer {of_qat} of the held-out problems with QAT and {of_bf16} in BF16" in RESULTS


def test_answers_after_45_new_seeds() -> None:
    answers = partial(last_answers, "collapse-safety", precision="bf16", num_seeds=45)
    qat, bf16 = answers("nvfp4-qat", "lr2e-4"), answers("bf16", "lr2e-4")
    tis = answers("nvfp4-noqat", "lr2e-4-tis")
    assert (
        f"the last checkpoints, served in BF16, answer {qat} of the held-out problems with QAT, "
        f"{bf16} in BF16, {tis} with token TIS"
    ) in RESULTS


def test_rewards_of_smollm2() -> None:
    claims = read_claims("collapse-smollm2-confirm").claims
    verdicts = {it.name: it.verdict for it in claims}
    assert [verdicts[name] for name in ("C1", "C4", "C9", "C10")] == [
        "INCONCLUSIVE",
        "PASS",
        "PASS",
        "PASS",
    ]
    details = {it.name: it.detail for it in claims}
    shown = {it.name: without_signs(it) for it in claims if it.estimate is not None}
    noqat, tis, qat = (shown[name] for name in ("C9", "C10", "C4"))
    assert all("lower in 10 of 10 seeds" in details[name] for name in ("C9", "C10"))
    assert (
        f"is {noqat[0]} lower than with it (90 % interval {noqat[2]} to {noqat[1]}), lower in each "
        "of ten seeds"
    ) in TEXT
    assert f"{tis[0]} lower ({tis[2]} to {tis[1]}), in each of the ten seeds" in TEXT
    assert f"QAT's reward is {qat[0]} below that of BF16" in TEXT
    assert f"({qat[2]} to {qat[1]}; the margin is 0.05)" in TEXT


def test_rewards_of_smollm2_through_verl() -> None:
    claims = read_claims("collapse-smollm2-verl").claims
    of = {it.name: it for it in claims}
    assert [of[name].verdict for name in ("C4", "C9", "C10")] == ["INCONCLUSIVE", "PASS", "PASS"]
    assert all("lower in 8 of 8 seeds" in of[name].detail for name in ("C9", "C10"))
    noqat, tis, qat = (without_signs(of[name]) for name in ("C9", "C10", "C4"))
    assert f"it is {noqat[0]} lower over 120 steps ({noqat[2]} to {noqat[1]}), in each of" in TEXT
    assert f"through verl {tis[0]} lower ({tis[2]} to {tis[1]}), in each of the eight" in TEXT
    assert (
        f"through verl {qat[0]} below ({qat[2]} to {qat[1]}), which may exceed the margin" in TEXT
    )


def test_answers_of_smollm2() -> None:
    answers = partial(last_answers, "collapse-smollm2-confirm", of_new_sums=True)
    qat, noqat, tis, rounded = (
        answers(arm, cell, "nvfp4")
        for arm, cell in (
            ("nvfp4-qat", "lr3e-5"),
            ("nvfp4-noqat", "lr3e-5"),
            ("nvfp4-noqat", "lr3e-5-tis"),
            ("bf16", "lr3e-5"),
        )
    )
    assert (
        "of the held-out problems whose sums no training problem has, the last checkpoints served "
        f"in NVFP4 answer {qat} with QAT, {noqat} without and {tis} with token TIS; those "
        f"trained in BF16 answer {answers('bf16', 'lr3e-5', 'bf16')} served in BF16, and {rounded} "
        "rounded to NVFP4."
    ) in TEXT


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ("verl_h200", "is {} times BF16's with QAT and {} times without (Qwen3-8B's"),
        ("verl_h200_30b", "and {} and {} times (Qwen3-30B-A3B's, four H200"),
    ],
)
def test_mismatch_at_true_size(record: str, sentence: str) -> None:
    runs = json.loads((RECORDS / "benchmarks" / f"{record}.json").read_text())["runs"]
    mean = {run["arm"]: run["mean_k3_kl"] for run in runs}
    ratios = (mean[arm] / mean["bf16"] for arm in ("nvfp4-qat", "nvfp4-noqat"))
    assert sentence.format(*(show_ratio(it).removesuffix("x") for it in ratios)) in TEXT
