"""Numbers that README states against this project, and of memory, are of the records."""

import re
from collections import Counter
from pathlib import Path
from statistics import fmean, median

import pandas as pd

from analysis.claims_table import Claim, read_table
from experiments.runs.attempts import list_run_dirs
from tests.records import recorded_metrics
from tests.unit.analysis.readme import COUNTS, RECORDS, TEXT, benchmark

MISMATCH_STUDIES = ("default", "smollm2", "verl-gpu", "verl-gpu-moe", "verl-seeds")


def metrics(run: Path) -> pd.DataFrame:
    return recorded_metrics(run)


def claims_about(name: str) -> list[Claim]:
    tables = [read_table(RECORDS / study / "claims.json") for study in MISMATCH_STUDIES]
    return [claim for table in tables for claim in table.claims if claim.name == name]


def test_studies_of_collapses_keep_their_marks() -> None:
    rows = re.findall(r"\| `(collapse[\w-]*)` \| ([^|]+) \|", TEXT)
    marked = {study for study, model in rows if model.endswith("†")}
    tables = {study: read_table(RECORDS / study / "claims.json") for study, _ in rows}
    assert marked == {study for study, table in tables.items() if any(table.marks.values())}
    assert 0 < len(marked) < len(tables)


def test_saved_weight_memory() -> None:
    names = ("serving_8b_h200", "serving_30b_h200")
    engines = {row["engine"]: row for name in names for row in benchmark(name)["rows"]}
    saved = [
        1 - engines[f"{model}:nvfp4"]["weight_gib"] / engines[f"{model}:bf16"]["weight_gib"]
        for model in ("qwen3-8b", "qwen3-30b-a3b")
    ]
    low, high = (round(10 * share) * 10 for share in saved)
    assert f"saves {low} to {high} % of the rollout engine's weight memory for Qwen3-8B and" in TEXT


def test_loss_at_the_lower_rate() -> None:
    record = RECORDS / "collapse-smollm2"
    mean_rewards = [
        [
            metrics(run)["critic/score/mean"].mean()
            for run in list_run_dirs(record)
            if f"_{arm}.lr1e-5_" in run.name
        ]
        for arm in ("nvfp4-qat", "nvfp4-noqat")
    ]
    lost = [qat - noqat for qat, noqat in zip(*mean_rewards, strict=True)]
    assert min(lost) > 0
    assert (
        f"at 1e-5 SmolLM2 loses {fmean(lost):.3f} without QAT, in each of {COUNTS[len(lost)]} seeds"
    ) in TEXT


def test_size_of_the_mismatch() -> None:
    of_qat, of_noqat = claims_about("qat_kl_ratio"), claims_about("noqat_kl_ratio")
    qat, noqat = ([it.estimate or 0.0 for it in claims] for claims in (of_qat, of_noqat))
    verdicts = Counter(claim.verdict for claim in of_qat)
    assert verdicts.keys() == {"PASS", "INCONCLUSIVE"}
    assert (
        f"in {COUNTS[len(MISMATCH_STUDIES)]} studies of small models with several seeds: mean k3 "
        f"KL is {min(qat):.2f} to {max(qat):.2f} times BF16's with QAT, at most twice in "
        f"{COUNTS[verdicts['PASS']]} of {COUNTS[len(qat)]} rows "
        f"({COUNTS[verdicts['INCONCLUSIVE']]} INCONCLUSIVE), and {min(noqat):.0f} to "
        f"{max(noqat):.0f} times without"
    ) in TEXT


def test_answers_served() -> None:
    to_bf16, to_noqat = claims_about("served_log_odds"), claims_about("served_gain")
    verdicts = Counter(claim.verdict for claim in to_bf16)
    fewer = sum((claim.estimate or 0.0) < 0 for claim in to_bf16)
    assert (
        f"fewer problems than BF16's in {COUNTS[fewer]} of the {COUNTS[len(to_bf16)]} rows with "
        f"several seeds ({COUNTS[verdicts['FAIL']]} FAIL, {COUNTS[verdicts['INCONCLUSIVE']]} "
        "INCONCLUSIVE)"
    ) in TEXT
    assert all((claim.estimate or 0.0) > 0 for claim in to_noqat)
    passed = sum(claim.verdict == "PASS" for claim in to_noqat)
    assert (
        f"more than those without QAT in all {COUNTS[len(to_noqat)]} that have both "
        f"({COUNTS[passed]} PASS)"
    ) in TEXT


def test_cost_of_training_layers() -> None:
    rows = benchmark("parameter_h200")["rows"]
    moe = [it["ratio"] for it in rows if (it["shape"], it["arm"]) == ("qwen3-30b-a3b", "qat")]

    def on_ranks(*names: str) -> list[float]:
        rows = [row for name in names for row in benchmark(f"fsdp_h200{name}")["rows"]]
        return [row["ratio"] for row in rows if row["arm"] == "qat"]

    many_tokens = on_ranks("x4_8192")
    recent = on_ranks("x2", "x2_newest", "x4")
    older = on_ranks("x4_first", "x2_before", "x2_oldest")
    assert (
        f"an MoE's layers take {100 * (min(moe) - 1):.0f} to {max(moe) - 1:.0%} longer on one GPU, "
        f"and layers under FSDP2, with 8,192 tokens a rank, {1 - min(many_tokens):.0%} less to "
        f"{max(many_tokens) - 1:.0%} more; "
        f"with 2,048, where the CPU sets the pace, {100 * (min(recent) - 1):.0f} to "
        f"{max(recent) - 1:.0%} more, by host (older code: {1 - min(older):.0%} less to "
        f"{max(older) - 1:.0%} more)."
    ).replace("%", " %") in TEXT


def test_cost_of_steps_through_verl() -> None:
    one, before, two, large = (
        {run["arm"]: run for run in benchmark(name)["rows"]}
        for name in ("verl_h200", "verl_h200_8b_reload", "verl_h200_2gpus", "verl_h200_30b")
    )
    half = benchmark("verl_h200_30b_half")["rows"]
    steps_s = [
        [runs[arm]["step_s"][1] for arm in ("nvfp4-qat", "bf16")] for runs in (one, before, two)
    ]
    longer = [f"{100 * (qat_s / bf16_s - 1):.0f}" for qat_s, bf16_s in steps_s]
    assert (
        "a step of Qwen3-8B's shape takes {} to {} % longer on one GPU and {} % on two".format(
            *longer
        )
    ) in TEXT
    training_s = [large[arm]["training_s"][1] for arm in ("nvfp4-qat", "bf16")]
    assert training_s[0] < training_s[1]
    floor_s, *half_s = (run["training_s"][1] for run in half)
    assert max(half_s) < half[0]["training_s"][2]  # of BF16's own steps
    more = [f"{100 * (edge(half_s) / floor_s - 1):.0f}" for edge in (min, max)]
    assert (
        "training of Qwen3-30B-A3B's takes no longer on four, of half its layers on two {} to "
        "{} % longer, which is within the spread of steps."
    ).format(*more) in TEXT


def test_cost_of_a_small_models_step() -> None:
    def step_s(arm: str) -> list[float]:
        runs = [it for it in list_run_dirs(RECORDS / "smollm2") if f"_{arm}_seed" in it.name]
        return [median(metrics(run)["timing_s/step"][1:]) for run in runs]

    ratio = max(step_s("nvfp4-qat")) / min(step_s("bf16"))
    assert f"of SmolLM2-135M takes up to {ratio:.1f} times as long as in BF16" in TEXT
