"""What the rows of a table say of runs that do not follow the protocol."""

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.load import load_results
from analysis.parity.judge import judge_study
from experiments.study.load import load_study
from experiments.study.schema import STUDIES, Study


def marks_after(study: Study, folder: Path, **changes: Any) -> tuple[str, ...]:
    for run in study.runs:
        path = folder / run.id / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    table = judge_study(study, load_results(study, folder))
    return table.marks["nano-dense"]


def test_runs_by_the_protocol_have_no_mark(study: Study, results_dir: Path) -> None:
    assert marks_after(study, results_dir) == ()


@pytest.mark.parametrize(
    ("changes", "mark"),
    [
        ({"started_at": "2026-11-21T23:59:59+00:00"}, "recorded before protocol 2026-11-21"),
        ({"digests": {"base": "same"}}, "seeds share one base checkpoint"),
        (
            {"git": {"commit": "a", "dirty": True, "diff_sha256": "d"}},
            "code had uncommitted changes",
        ),
        ({"git": None}, "code had uncommitted changes"),
    ],
    ids=["early", "one base", "dirty", "no commit"],
)
def test_other_runs_are_marked(
    study: Study, results_dir: Path, changes: dict[str, Any], mark: str
) -> None:
    assert marks_after(study, results_dir, **changes) == (mark,)


def test_fewer_seeds_are_marked(study: Study, results_dir: Path) -> None:
    fewer = study.model_copy(update={"seeds": (0, 1, 2)})
    assert marks_after(fewer, results_dir) == ("3 of the protocol's 5 seeds",)


def test_runs_evaluated_on_another_device_are_marked(study: Study, results_dir: Path) -> None:
    rewrite_evaluations(results_dir, device="cpu")
    assert marks_after(study, results_dir) == (), "there its runs were trained"
    results = load_results(study, results_dir)
    on_gpu = study.model_copy(update={"device": "cuda"})
    num_runs = len([run for run in study.runs if run.model == "nano-dense"])
    mark = f"{num_runs} of its {num_runs} runs were evaluated on a CPU"
    assert judge_study(on_gpu, results).marks["nano-dense"] == (mark,)


def rewrite_evaluations(folder: Path, **changes: Any) -> None:
    """Changes every sampled evaluation below a folder; `share` is that of right answers."""
    for path in folder.glob("*/eval.json"):
        evaluations = json.loads(path.read_text())
        for it in (it for it in evaluations if it["decoding"] == "sampled"):
            it |= changes
            right = round(it["prompts"] * it.pop("share", it["accuracy"]))
            it["correct"] = [it["samples_per_prompt"]] * right + [0] * (it["prompts"] - right)
            it["accuracy"] = right / it["prompts"]
        path.write_text(json.dumps(evaluations))


def test_runs_evaluated_before_and_after_training_alone_are_marked(
    study: Study, results_dir: Path
) -> None:
    for path in results_dir.glob("*/eval.json"):
        evaluations = json.loads(path.read_text())
        path.write_text(json.dumps([it for it in evaluations if it["step"] in {0, study.rl.steps}]))
    assert marks_after(study, results_dir) == ("not evaluated within training",)


def test_fewer_samples_a_prompt_are_marked(study: Study, results_dir: Path) -> None:
    rewrite_evaluations(results_dir, samples_per_prompt=1)
    assert marks_after(study, results_dir) == ("1 of the protocol's 4 samples a prompt",)


@pytest.mark.parametrize(
    ("share", "found"),
    [
        (0.5, ()),
        (0.875, ("BF16 ended at 0.875, outside 0.5 to 0.8",)),
        (0.4375, ("BF16 ended at 0.438, outside 0.5 to 0.8",)),
    ],
)
def test_bf16_outside_of_the_range_is_marked(
    study: Study, results_dir: Path, share: float, found: tuple[str, ...]
) -> None:
    rewrite_evaluations(results_dir, share=share)
    assert marks_after(study, results_dir) == found


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_verdicts_of_one_pretrained_checkpoint_are_marked(
    study: Study, results_dir: Path, name: str
) -> None:
    pretrained = next(iter(load_study(STUDIES / f"{name}.yaml").models.values()))
    of_one = study.model_copy(update={"models": study.models | {"nano-dense": pretrained}})
    table = judge_study(of_one, load_results(study, results_dir))
    mark = "one pretrained checkpoint: verdicts hold for it alone"
    assert table.marks == {"nano-dense": (mark,), "nano-moe": ()}


def test_a_study_without_bf16_says_what_is_not_judged(study: Study, results_dir: Path) -> None:
    alone = study.model_copy(update={"arms": ("nvfp4-noqat", "nvfp4-qat")})
    table = judge_study(alone, load_results(alone, results_dir))
    mark = "no bf16 arm, so mismatch and accuracy are not judged"
    assert table.marks == {model: (mark,) for model in alone.models}
    assert {claim.name for claim in table.claims} == {"served_gain", "weight_memory_error"}


def test_rows_of_marked_runs_are_marked(study: Study, results_dir: Path) -> None:
    marks_after(study, results_dir, digests={"base": "same"})
    table = judge_study(study, load_results(study, results_dir))
    lines = table.to_markdown().splitlines()
    assert sum(line.startswith("| nano-dense † |") for line in lines) == 11
    assert "† nano-dense: seeds share one base checkpoint." in lines
