"""Numbers in README's own sentences are those of the records; its tables are made from them."""

import json
import re
from functools import partial
from statistics import fmean

import pytest

from analysis.claims_table import read_table, show_ratio
from analysis.collapse.outcome_table import last_accuracies
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
    shares = last_accuracies(study, RECORDS / record, runs, precision, among)
    assert len(shares) == len(runs) == {"collapse-confirm": 10, "collapse-smollm2": 3}[record]
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
    assert (
        f"truncated importance sampling, {num_with_tis} of ten runs collapses (QAT: {qat})" in TEXT
    )
    detail = next(it.detail for it in table.claims if it.name == "C1")
    to_qat, to_bf16 = (
        f"{float(p):.5f}".rstrip("0") for p in re.findall(r"corrected (\S+?)(?:;|$)", detail)
    )
    assert f"(p = {to_qat} against QAT, {to_bf16} against BF16, corrected" in TEXT


def test_answers_after_ten_seeds() -> None:
    qat = last_answers("collapse-confirm", "nvfp4-qat", "lr2e-4", "nvfp4")
    bf16 = last_answers("collapse-confirm", "bf16", "lr2e-4", "bf16")
    tis = last_answers("collapse-confirm", "nvfp4-noqat", "lr2e-4-tis", "nvfp4")
    assert f"QAT's last checkpoints answer {qat} of the held-out problems, BF16's {bf16}" in TEXT
    assert f"the last checkpoints answer {tis} of the held-out problems (QAT: {qat})" in TEXT


def test_answers_of_smollm2() -> None:
    def at_both_rates(arm: str, precision: Precision, *, of_new_sums: bool = False) -> str:
        answers = partial(last_answers, "collapse-smollm2", arm, of_new_sums=of_new_sums)
        return " and ".join(answers(cell, precision) for cell in ("lr1e-5", "lr3e-5"))

    low, high = at_both_rates("nvfp4-qat", "nvfp4").split(" and ")
    noqat, rounded = at_both_rates("nvfp4-noqat", "nvfp4"), at_both_rates("bf16", "nvfp4")
    assert (
        f"trained with QAT answer {low} of the held-out problems at 1e-5 and {high} at 3e-5, "
        f"without QAT {noqat}, trained in BF16 and rounded afterwards {rounded}. "
        f"In BF16, not rounded, the last answer {at_both_rates('bf16', 'bf16')}."
    ) in TEXT
    are_new = have_new_sums(load_study(RECORDS / "collapse-smollm2" / "study.yaml").task)
    new = {
        arm: at_both_rates(arm, "nvfp4", of_new_sums=True)
        for arm in ("nvfp4-qat", "nvfp4-noqat", "bf16")
    }
    assert (
        f"Of the {sum(are_new)} of {len(are_new)} problems whose sum no training problem has, "
        f"those with QAT answer {new['nvfp4-qat']}, those without {new['nvfp4-noqat']}, "
        f"those rounded {new['bf16']}."
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
