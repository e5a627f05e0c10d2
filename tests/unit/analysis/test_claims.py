"""Claims of parity: judged by the results, written, read back and shown."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from analysis.claims_table import ClaimsTable, read_table, show_ratio
from analysis.load import load_results
from analysis.parity.judge import judge_study
from analysis.results import Results
from experiments.rl.metric_names import MISMATCH_COUNT
from experiments.runs.summary import KL, KL_RATIO
from experiments.study.schema import ROOT, Study
from experiments.support.json_files import read_json
from tests.files import edit_json
from tests.unit.analysis.synthetic_results import (
    BF16_GIB,
    KL_RATIOS,
    NOISE_FLOOR,
    PACKED_SHARE,
    judge,
    rewrite_metrics,
    shortened,
    stop,
    write_results,
)


def test_all_claims_of_both_models(study: Study, results: Results) -> None:
    table = judge_study(study, results)
    names = ["reward_gain", "qat_kl_ratio", "noqat_kl_ratio", "ffn_kl_ratio"]
    names += ["accuracy_log_odds", "noqat_accuracy", "served_log_odds", "noqat_served"]
    names += ["served_gain", "served_beside_rounded", "weight_memory_error"]
    assert [(it.model, it.name) for it in table.claims] == [
        (model, name) for model in ("nano-dense", "nano-moe") for name in names
    ]


@pytest.mark.parametrize(
    ("name", "arm"),
    [
        ("qat_kl_ratio", "nvfp4-qat"),
        ("noqat_kl_ratio", "nvfp4-noqat"),
        ("ffn_kl_ratio", "nvfp4-qat-ffn"),
    ],
)
def test_ratios_recover_the_truth(study: Study, results_dir: Path, name: str, arm: str) -> None:
    claim = judge(study, results_dir)["nano-dense", name]
    # 150 values with 20 % spread in numerator and denominator: the standard error is 2.3 %; three
    assert claim.estimate == pytest.approx(KL_RATIOS[arm], rel=0.07)
    assert claim.low < claim.estimate < claim.high
    assert claim.noise_floor == pytest.approx(NOISE_FLOOR, rel=0.08)
    assert claim.num_seeds == 5


def test_verdicts_follow_the_results(study: Study, results_dir: Path) -> None:
    before = judge(study, results_dir)
    assert before["nano-dense", "qat_kl_ratio"].verdict == "PASS"
    assert before["nano-dense", "ffn_kl_ratio"].verdict == "REPORTED"
    rewrite_metrics(results_dir, study, "nvfp4-qat", **{"rollout_corr/k3_kl": 10 * NOISE_FLOOR})
    rewrite_metrics(results_dir, study, "nvfp4-noqat", **{"rollout_corr/k3_kl": 30 * NOISE_FLOOR})
    rewrite_metrics(results_dir, study, "bf16", **{"critic/score/mean": 0.5})
    after = judge(study, results_dir)
    assert after["nano-dense", "qat_kl_ratio"].verdict == "FAIL"
    assert after["nano-dense", "noqat_kl_ratio"].verdict == "INCONCLUSIVE"
    assert after["nano-dense", "reward_gain"].verdict == "FAIL"


@pytest.mark.parametrize(
    ("arm", "name", "steps", "verdict", "lowest"),
    [
        # 29 steps of 30 make it 100 times BF16's whatever the other one is
        pytest.param("nvfp4-noqat", "noqat_kl_ratio", range(7, 8), "PASS", 80, id="no QAT"),
        pytest.param("nvfp4-noqat", "noqat_kl_ratio", range(3, 31), "INCONCLUSIVE", 1, id="most"),
        pytest.param("nvfp4-noqat", "noqat_kl_ratio", range(31), "INCONCLUSIVE", 0, id="all"),
        pytest.param("nvfp4-qat", "qat_kl_ratio", range(7, 8), "INCONCLUSIVE", 0.8, id="QAT"),
    ],
)
def test_undefined_kl_may_be_any_and_decides_nothing(
    study: Study, results_dir: Path, arm: str, name: str, steps: range, verdict: str, lowest: float
) -> None:
    rewrite_metrics(results_dir, study, arm, steps, **{"rollout_corr/k3_kl": None})
    claim = judge(study, results_dir)["nano-moe", name]
    assert claim.verdict == verdict and claim.low is not None
    assert lowest <= claim.low < 1.3 * KL_RATIOS[arm]
    assert claim.cells()[3] == "overflow" and claim.interval.endswith(" to overflow")
    assert f"undefined in {5 * len(set(steps) - {0})} of 150 steps" in claim.detail


@pytest.mark.parametrize("key", ["critic/score/mean", "response_length/mean"])
def test_a_mean_over_responses_that_is_undefined_is_refused(
    study: Study, results_dir: Path, key: str
) -> None:
    rewrite_metrics(results_dir, study, "nvfp4-qat", range(7, 8), **{key: None})
    refused = rf"qat_seed0/metrics.jsonl: step 7: {key} is undefined"
    with pytest.raises(ValueError, match=refused):
        judge(study, results_dir)
    path = results_dir / "nano-dense_nvfp4-qat_seed0" / "metrics.jsonl"
    path.write_text(path.read_text().replace(f', "{key}": null', ""))  # not there at all
    with pytest.raises(ValueError, match=refused):
        judge(study, results_dir)


@pytest.mark.parametrize(
    "source", ["nano-moe_nvfp4-qat_seed1", "nano-moe_bf16_seed4", "nano-dense_nvfp4-qat_seed4"]
)
@pytest.mark.parametrize("file", ["metrics.jsonl", "eval.json"])
def test_a_run_that_repeats_another_seed_arm_or_model_is_refused_whatever_time_it_took(
    study: Study, results_dir: Path, file: str, source: str
) -> None:
    copied = (results_dir / source / file).read_text()
    copy = results_dir / "nano-moe_nvfp4-qat_seed4" / file
    copy.write_text(copied.replace('"timing_s/gen": 2.0', '"timing_s/gen": 3.0'))
    with pytest.raises(ValueError, match=rf"nvfp4-qat_seed4: has the .* of {source} in e"):
        judge(study, results_dir)


@pytest.mark.parametrize("value", [0.0, None], ids=["zero", "undefined"])
def test_no_noise_floor_is_an_error(study: Study, results_dir: Path, value: float | None) -> None:
    rewrite_metrics(results_dir, study, "bf16", **{"rollout_corr/k3_kl": value})
    with pytest.raises(ValueError, match="there is no noise floor"):
        judge(study, results_dir)


def test_stopped_arm_is_judged_over_the_steps_that_it_did(study: Study, results_dir: Path) -> None:
    for run in (run for run in study.runs if run.arm == "nvfp4-noqat"):
        stop(results_dir, run, 20)
    claim = judge(study, results_dir)["nano-dense", "noqat_kl_ratio"]
    assert claim.verdict == "PASS" and claim.detail.endswith("stopped, so of the first 20 steps")


@pytest.mark.parametrize(
    ("trainer", "device", "source"),
    [
        ("local", "cpu", "bytes streamed to the engine"),
        ("verl", "cpu", "bytes streamed to the engine"),
        ("verl", "cuda", "as vLLM reports, with its caches, workspaces and gaps"),
    ],
)
def test_memory_says_where_it_was_measured(
    study: Study, results_dir: Path, trainer: str, device: str, source: str
) -> None:
    judged = study.model_copy(update={"trainer": trainer, "device": device})
    claims = judge(judged, results_dir, trained=study)
    assert claims["nano-dense", "weight_memory_error"].detail.endswith(source)


def of_verl(study: Study) -> Study:
    return study.model_copy(update={"trainer": "verl", "device": "cuda"})


def change_memory(run_dir: Path, **values: float) -> None:
    edit_json(run_dir / "manifest.json", lambda it: it["memory"].update(values))


def test_memory_is_judged_by_what_vllm_holds_and_its_report_stands_beside(
    study: Study, results_dir: Path
) -> None:
    for run in study.runs:
        memory = read_json(results_dir / run.id / "manifest.json")["memory"]
        held_gib = memory["measured_packed_gib"] or BF16_GIB
        change_memory(results_dir / run.id, reported_gib=held_gib + 0.5 / 1024)
    claim = judge(of_verl(study), results_dir, trained=study)["nano-dense", "weight_memory_error"]
    assert claim.verdict == "PASS"
    assert claim.detail.endswith("parameters that vLLM holds; it reports up to 0.50 MiB more")


def test_share_of_bf16_divides_by_the_bf16_arm_s_measurement(
    study: Study, results_dir: Path
) -> None:
    for run in (run for run in study.runs if run.arm == "bf16"):
        change_memory(results_dir / run.id, measured_bf16_gib=2 * BF16_GIB)
    claim = judge(study, results_dir)["nano-dense", "weight_memory_error"]
    assert "packed weights: 20.0% of BF16's" in claim.detail


def test_wrong_memory_prediction_fails(study: Study, results_dir: Path) -> None:
    predicted_gib = 1.01 * PACKED_SHARE["nvfp4-qat-ffn"] * BF16_GIB
    run_dir = results_dir / "nano-moe_nvfp4-qat-ffn_seed1"
    change_memory(run_dir, predicted_packed_gib=predicted_gib)
    claims = judge(of_verl(study), results_dir, trained=study)
    assert claims["nano-dense", "weight_memory_error"].verdict == "PASS"
    assert claims["nano-moe", "weight_memory_error"].verdict == "FAIL"


def test_an_exact_arm_passes_where_no_log_prob_differs(study: Study, results: Results) -> None:
    exact = study.model_copy(update={"exact": True})
    results.metrics[MISMATCH_COUNT] = 0.0
    is_qat = (results.metrics["arm"] == "nvfp4-qat") & (results.metrics["step"] == 7)
    results.metrics.loc[is_qat & (results.metrics["model"] == "nano-moe"), MISMATCH_COUNT] = 2.0
    claims = [it for it in judge_study(exact, results).claims if it.name == "unequal_log_probs"]
    failed = [it for it in claims if it.verdict == "FAIL"]
    assert [it.verdict for it in claims].count("PASS") == 2 * len(study.arms) - 1
    assert [(it.model, it.statement) for it in failed] == [
        ("nano-moe", "log-probs that differ, nvfp4-qat")
    ]
    assert failed[0].cells()[2:] == ("<= 0", "10", "exact")  # 2 in each of 5 seeds


def test_claims_of_absent_arms_give_no_row(study: Study, results_dir: Path) -> None:
    smaller = study.model_copy(update={"arms": ("bf16", "nvfp4-noqat")})
    names = {name for _, name in judge(smaller, results_dir)}
    of_noqat = {"noqat_kl_ratio", "noqat_accuracy", "noqat_served"}
    assert names == {"reward_gain", "weight_memory_error"} | of_noqat


@pytest.mark.parametrize("num_steps", [2, 3, 7])
def test_short_runs_are_judged(study: Study, tmp_path: Path, num_steps: int) -> None:
    short = shortened(study, num_steps, num_prompts=8)
    write_results(short, tmp_path)
    gain = judge(short, tmp_path)["nano-dense", "reward_gain"]
    assert gain.estimate is not None and gain.estimate > 0.2


def test_one_step_has_no_gain(study: Study, results_dir: Path) -> None:
    for run in (run for run in study.runs if run.arm == "bf16"):
        stop(results_dir, run, 1)
    with pytest.raises(ValueError, match=r"set rl\.steps to 2 or more"):
        judge(study, results_dir)


def test_infinity_survives_json(study: Study, results_dir: Path, tmp_path: Path) -> None:
    rewrite_metrics(results_dir, study, "nvfp4-noqat", **{"rollout_corr/k3_kl": None})
    results = load_results(study, results_dir)
    table = judge_study(study, results)
    path = tmp_path / "claims.json"
    path.write_text(table.model_dump_json())
    assert read_table(path) == table


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [(0.969, "0.97x"), (1.3, "1.30x"), (15.23, "15.2x"), (22843, "22,843x"), (np.inf, "overflow")],
)
def test_ratios_are_shown_in_about_three_digits(ratio: float, shown: str) -> None:
    assert show_ratio(ratio) == shown


RECORDS = ROOT / "experiments" / "records"


def shown(table: ClaimsTable, with_details: bool = False) -> list[str]:
    text = StringIO()
    table.show(Console(file=text, width=80), with_details)
    return text.getvalue().splitlines()


def test_a_detail_is_no_markup(study: Study, results: Results) -> None:
    table = judge_study(study, results)
    first = table.claims[0].model_copy(update={"detail": "[enforce fail] [/x]"})
    lines = shown(table.model_copy(update={"claims": (first, *table.claims[1:])}), True)
    assert any("[enforce fail] [/x]" in line for line in lines)


@pytest.mark.parametrize(
    "path", sorted(RECORDS.glob("*/claims.json")), ids=lambda path: path.parent.name
)
def test_recorded_claims_are_one_line_each(path: object) -> None:
    table = read_table(path)
    num_marks = sum(map(len, table.marks.values()))
    lines = shown(table)
    num_headings = sum("value" in line.split() for line in lines)
    assert len(lines) == len(table.claims) + len(table.marks) + num_marks + num_headings
    assert not any("…" in line for line in lines)
    for claim in table.claims:
        if claim.estimate is not None:
            assert any(claim.shown_estimate in line for line in lines)


@pytest.mark.parametrize("study", ["default-long", "smollm2"])
def test_k3_kl_and_its_interval_are_those_of_the_claim(study: str) -> None:
    table = read_table(RECORDS / study / "claims.json")
    arms = {(it.model, it.arm): it.estimates for it in table.arms}
    for claim in (it for it in table.claims if it.name == "qat_kl_ratio"):
        ratio = arms[claim.model, "nvfp4-qat"][KL_RATIO]
        assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx(
            (claim.estimate, claim.low, claim.high), rel=1e-5
        )
        assert arms[claim.model, "bf16"][KL].estimate == pytest.approx(claim.noise_floor, rel=1e-5)
