"""Claims where steps, tokens, prompts or common checkpoints are few."""

import json
from pathlib import Path

import pytest
from synthetic_results import judge, write_results

from experiments.study.schema import Run, Study


def test_floor_of_few_tokens_gives_no_ratio(study: Study, results_dir: Path) -> None:
    for run in (run for run in study.runs if run.arm == "bf16"):
        path = results_dir / run.id / "metrics.jsonl"
        first, *rest = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [first, *(row | {"rollout_corr/k3_kl": 0.0} for row in rest)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    claims = judge(study, results_dir)
    for name, verdict in (("qat_kl_ratio", "INCONCLUSIVE"), ("ffn_kl_ratio", "REPORTED")):
        claim = claims["nano-dense", name]
        assert claim.verdict == verdict and claim.detail == "too few tokens for a ratio"
        assert claim.cells()[3:] == ("-", "-")
        assert "NaN" not in claim.model_dump_json()


@pytest.mark.parametrize(("num_steps", "verdict"), [(9, "INCONCLUSIVE"), (10, "PASS")])
def test_one_short_run_is_shown_but_not_judged(
    study: Study, tmp_path: Path, num_steps: int, verdict: str
) -> None:
    single = study.model_copy(update={"seeds": (0,)})
    write_results(single, tmp_path / "short", num_steps, num_prompts=8)
    claims = judge(single, tmp_path / "short")
    assert claims["nano-dense", "noqat_kl_ratio"].verdict == verdict
    for name in ("reward_gain", "qat_kl_ratio", "noqat_kl_ratio"):
        claim = claims["nano-dense", name]
        assert ("too few steps for a verdict" in claim.detail) == (num_steps == 9)
        assert " to " in claim.cells()[-1]


def test_like_arms_of_few_prompts_are_not_equivalent(study: Study, results_dir: Path) -> None:
    for run in (run for run in study.runs if run.arm in ("bf16", "nvfp4-qat")):
        path = results_dir / run.id / "eval.json"
        like = {"prompts": 32, "accuracy": 0.5}
        evaluations = [
            it | like | {"correct": [it["samples_per_prompt"]] * 16 + [0] * 16}
            for it in json.loads(path.read_text())
        ]
        path.write_text(json.dumps(evaluations))
    claims = judge(study.model_copy(update={"arms": ("bf16", "nvfp4-qat")}), results_dir)
    accuracy = claims["nano-dense", "accuracy_margin"]
    assert (accuracy.estimate, accuracy.verdict) == (0, "INCONCLUSIVE")
    assert accuracy.cells()[-1] == "-0.058 to 0.058"
    assert claims["nano-dense", "weight_memory_error"].cells()[-1] == "exact"


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
    assert claim.detail.endswith("0.000 less 0.000, both after step 10 of 20")
    assert "after step" not in claims["nano-moe", "noqat_accuracy"].detail
