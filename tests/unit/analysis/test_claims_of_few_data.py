"""Claims where steps, tokens, prompts or common checkpoints are few."""

import json
from pathlib import Path

import pytest

from experiments.study.schema import Run, Study
from tests.unit.analysis.synthetic_results import judge, shortened, write_results


def test_floor_of_few_tokens_gives_no_ratio(study: Study, results_dir: Path) -> None:
    for run in (run for run in study.runs if run.arm == "bf16"):
        path = results_dir / run.id / "metrics.jsonl"
        if run.seed == 0:
            continue
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row | {"rollout_corr/k3_kl": 0.0} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    claims = judge(study, results_dir)
    for name, verdict in (("qat_kl_ratio", "INCONCLUSIVE"), ("ffn_kl_ratio", "REPORTED")):
        claim = claims["nano-dense", name]
        assert claim.verdict == verdict and claim.detail.endswith("too few tokens for a ratio")
        assert claim.cells()[3:] == ("-", "-")
        assert "NaN" not in claim.model_dump_json()


@pytest.mark.parametrize(("num_steps", "verdict"), [(11, "INCONCLUSIVE"), (12, "PASS")])
def test_fewer_than_sixty_steps_in_all_are_shown_but_not_judged(
    study: Study, tmp_path: Path, num_steps: int, verdict: str
) -> None:
    short = shortened(study, num_steps, num_prompts=8)
    write_results(short, tmp_path)
    claim = judge(short, tmp_path)["nano-dense", "noqat_kl_ratio"]
    assert claim.verdict == verdict
    assert claim.detail.endswith("55 steps in all, fewer than 60") == (num_steps == 11)
    assert " to " in claim.cells()[-1]


def test_one_seed_is_reported_and_not_judged(study: Study, tmp_path: Path) -> None:
    longer = shortened(study, num_steps=100, num_prompts=256)
    single = longer.model_copy(update={"seeds": (0,)})
    write_results(single, tmp_path)
    for claim in judge(single, tmp_path).values():
        assert claim.verdict == "REPORTED"
        assert claim.estimate is not None and (claim.exact or claim.cells()[-1] == "-")


def test_an_arm_that_is_far_worse_in_a_few_steps_does_not_pass(
    study: Study, results_dir: Path
) -> None:
    for run in (run for run in study.runs if run.arm == "nvfp4-qat"):
        path = results_dir / run.id / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows[run.seed :: 20]:
            row["rollout_corr/k3_kl"] *= 100
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    claim = judge(study, results_dir)["nano-dense", "qat_kl_ratio"]
    assert claim.verdict == "FAIL"
    assert "steps above 10 medians: 10 of 150 (up to" in claim.detail


def test_served_accuracy_tells_qat_from_no_qat(study: Study, results_dir: Path) -> None:
    # the synthetic arm without QAT loses a tenth of its answers in NVFP4
    claims = judge(study, results_dir)
    assert claims["nano-dense", "served_gain"].verdict == "PASS"
    noqat = claims["nano-dense", "noqat_served"]
    assert noqat.verdict == "REPORTED" and noqat.high is not None and noqat.high < -0.3
    assert claims["nano-dense", "noqat_accuracy"].high is not None


def test_accuracy_is_compared_after_the_same_step(study: Study, results_dir: Path) -> None:
    for run in study.runs:
        path = results_dir / run.id / "eval.json"
        rows = json.loads(path.read_text())
        rows += [
            it | {"step": 10, "accuracy": 0.0, "correct": [0] * 256}
            for it in rows
            if it["step"] == 0
        ]
        stopped = run == Run("nano-dense", "nvfp4-noqat", 1)
        path.write_text(json.dumps([it for it in rows if it["step"] <= (10 if stopped else 30)]))
    claims = judge(study, results_dir)
    claim = claims["nano-dense", "noqat_accuracy"]
    assert claim.detail.endswith("sampled, both after step 10 of 30")
    assert claim.detail.startswith("nvfp4-noqat in BF16 0.000, bf16 in BF16 0.000")
    assert "after step" not in claims["nano-moe", "noqat_accuracy"].detail


def test_seeds_that_all_lie_on_the_bound_give_no_verdict(study: Study, results_dir: Path) -> None:
    for run in (run for run in study.runs if run.arm == "nvfp4-noqat"):
        path = results_dir / f"{run.model}_nvfp4-qat_seed{run.seed}" / "eval.json"
        same = json.loads(path.read_text())
        longer = [it | {"response_tokens_mean": it["response_tokens_mean"] + 1} for it in same]
        (results_dir / run.id / "eval.json").write_text(json.dumps(longer))
    claim = judge(study, results_dir)["nano-dense", "served_gain"]
    assert (claim.low, claim.high, claim.verdict) == (0.0, 0.0, "INCONCLUSIVE")
    assert claim.detail.endswith("no spread between seeds, all on the bound")
