"""Numbers in README's own sentences are those of the records; its tables are made from them."""

import json
import re
from functools import partial
from statistics import fmean

import pytest

from analysis.claims_table import read_table, show_ratio
from analysis.collapse.outcome_table import last_accuracies, read_evaluated
from experiments.runs.evaluation import Precision
from experiments.study.load import load_study
from experiments.study.schema import ROOT
from qat_core.rl.tasks import have_new_sums

RECORDS = ROOT / "experiments" / "records"
TEXT = " ".join((ROOT / "README.md").read_text().split())
COUNTS = {0: "none", 1: "one", 2: "two", 10: "ten"}


def last_answers(
    record: str, arm: str, cell: str, precision: Precision, *, of_new_sums: bool = False
) -> str:
    """Mean accuracy of all seeds' last checkpoints, of sampled answers, as README rounds it."""
    study = load_study(RECORDS / record / "study.yaml")
    runs = [run for run in study.runs if (run.arm, run.cell) == (arm, cell)]
    among = have_new_sums(study.task)[: study.evaluation.prompts] if of_new_sums else []
    evaluated = read_evaluated(study, RECORDS / record, runs)
    shares = last_accuracies(evaluated, precision, among)
    assert len(shares) == len(runs) == 10
    return f"{fmean(shares):.2f}"


def test_collapses_of_ten_seeds() -> None:
    table = read_table(RECORDS / "collapse-confirm" / "claims.json")
    collapsed = [run.partition("_seed")[0].partition("_")[2] for run in table.collapsed_at]
    found = {arm: collapsed.count(f"{arm}.lr2e-4") for arm in ("nvfp4-noqat", "nvfp4-qat", "bf16")}
    record = RECORDS / "collapse-confirm"
    assert [len(list(record.glob(f"*_{arm}.lr2e-4_seed*"))) for arm in found] == [10, 10, 10]
    noqat, qat, bf16 = (COUNTS[it] for it in found.values())
    assert (
        f"without QAT {noqat} of ten runs collapse within 240 steps, with QAT {qat} of ten, "
        f"in BF16 {bf16} of ten"
    ) in TEXT
    num_with_tis = COUNTS[collapsed.count("nvfp4-noqat.lr2e-4-tis")]
    assert f"without QAT, but with token TIS, {num_with_tis} of ten runs collapses" in TEXT
    assert f"{qat} runs with QAT collapse at a mismatch" in TEXT
    detail = next(it.detail for it in table.claims if it.name == "C1")
    to_qat, to_bf16 = (
        f"{float(p):.5f}".rstrip("0") for p in re.findall(r"corrected (\S+?)(?:;|$)", detail)
    )
    assert f"(p = {to_qat} against QAT, {to_bf16} against BF16, corrected" in TEXT


def test_answers_after_ten_seeds() -> None:
    qat = last_answers("collapse-confirm", "nvfp4-qat", "lr2e-4", "nvfp4")
    bf16 = last_answers("collapse-confirm", "bf16", "lr2e-4", "bf16")
    tis = last_answers("collapse-confirm", "nvfp4-noqat", "lr2e-4-tis", "nvfp4")
    assert (
        f"QAT's last checkpoints answer {qat} of the held-out problems, BF16's {bf16}, "
        f"those of token TIS {tis};"
    ) in TEXT


def test_rewards_of_smollm2() -> None:
    claims = read_table(RECORDS / "collapse-smollm2-confirm" / "claims.json").claims
    verdicts = {it.name: it.verdict for it in claims}
    assert [verdicts[name] for name in ("C1", "C4", "C9", "C10")] == [
        "INCONCLUSIVE",
        "PASS",
        "PASS",
        "PASS",
    ]
    details = {it.name: it.detail for it in claims}
    interval = r"90 % interval: -(\S+) \(-(\S+) to -(\S+)\)"
    found = {name: re.search(interval, detail) for name, detail in details.items()}
    noqat, tis, qat = (found[name].groups() for name in ("C9", "C10", "C4"))
    assert all("lower in 10 of 10 seeds" in details[name] for name in ("C9", "C10"))
    assert (
        f"is {noqat[0]} lower than with it (90 % interval {noqat[2]} to {noqat[1]}), lower in each"
    ) in TEXT
    assert f"{tis[0]} lower ({tis[2]} to {tis[1]}), in each seed" in TEXT
    assert f"QAT's reward is {qat[0]} below that of BF16" in TEXT
    assert f"({qat[2]} to {qat[1]}; the margin is 0.05)" in TEXT


def test_answers_of_smollm2() -> None:
    answers = partial(last_answers, "collapse-smollm2-confirm")

    def in_nvfp4(*, of_new_sums: bool) -> list[str]:
        settings = [
            ("nvfp4-qat", "lr3e-5"),
            ("nvfp4-noqat", "lr3e-5"),
            ("nvfp4-noqat", "lr3e-5-tis"),
            ("bf16", "lr3e-5"),
        ]
        return [answers(*setting, "nvfp4", of_new_sums=of_new_sums) for setting in settings]

    qat, noqat, tis, rounded = in_nvfp4(of_new_sums=False)
    assert (
        f"served in NVFP4 answer {qat} with QAT, {noqat} without, {tis} with token TIS, and "
        f"{rounded} if trained in BF16 and rounded afterwards; "
        f"BF16 served in BF16 answers {answers('bf16', 'lr3e-5', 'bf16')}."
    ) in TEXT
    task = load_study(RECORDS / "collapse-smollm2-confirm" / "study.yaml").task
    are_new = have_new_sums(task)
    assert (
        f"Of the {sum(are_new)} of {len(are_new)} whose calculation no training problem has: "
        f"{', '.join(in_nvfp4(of_new_sums=True))} and "
        f"{answers('bf16', 'lr3e-5', 'bf16', of_new_sums=True)}."
    ) in TEXT


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ("verl_h200_8b_rotary", "is {} times BF16's with QAT and {} times without (Qwen3-8B's"),
        ("verl_h200_30b", "and {} and {} times (Qwen3-30B-A3B's, four H200"),
    ],
)
def test_mismatch_at_true_size(record: str, sentence: str) -> None:
    runs = json.loads((RECORDS / "benchmarks" / f"{record}.json").read_text())["runs"]
    mean = {run["arm"]: run["mean_k3_kl"] for run in runs}
    ratios = (mean[arm] / mean["bf16"] for arm in ("nvfp4-qat", "nvfp4-noqat"))
    assert sentence.format(*(show_ratio(it).removesuffix("x") for it in ratios)) in TEXT
