"""A base that stops at an accuracy: what is measured is what sampled answers have."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from experiments.base.make import make_base
from experiments.rl.prompts import decode_responses, encode_prompt
from experiments.rl.tasks import make_problems, score
from experiments.runs.inputs import base_digest
from experiments.support.json_files import read_json
from qat_core.rollout.eager import EagerEngine
from tests.study_files import changed_study
from tests.workflow.programs import SMOKE

SAMPLES, PROBLEMS = 4, 512
LEARNING = {"steps": 200, "batch_size": 32, "lr": 3e-3, "mixed_steps": 200, "worked_fraction": 0.5}
CHANGES: dict[str, Any] = {
    "models/tiny/config": "experiments/models/nano-dense.json",
    "task/train_prompts": PROBLEMS,
}


def test_a_base_stops_at_the_accuracy_that_its_sampled_answers_have(tmp_path: Path) -> None:
    changes = CHANGES | {"models/tiny/pretrain": LEARNING | {"stop_accuracy": 0.2}}
    study, base = changed_study(tmp_path, changes, SMOKE), tmp_path / "base"
    make_base(study, "tiny", base)
    made = read_json(base / "manifest.json", "")
    assert made["accuracy"] >= 0.2 and made["steps"] < 200 and made["steps"] % 25 == 0
    tokenizer = AutoTokenizer.from_pretrained(base)
    asked = make_problems(study.task, "train") * SAMPLES
    prompts = [encode_prompt(tokenizer, it) for it in asked]
    rollouts = EagerEngine(base).generate(prompts, 24, 1.0, seed=0)
    answers = zip(decode_responses(tokenizer, rollouts), asked, strict=True)
    right = [score(study.task, response, it.answer) for response, it in answers]
    # three standard errors of as many answers as there are problems are 0.065
    assert sum(right) / len(right) == pytest.approx(made["accuracy"], abs=0.065)


def test_an_accuracy_that_is_not_reached_is_refused(tmp_path: Path) -> None:
    changes = CHANGES | {"models/tiny/pretrain": {"steps": 3, "stop_accuracy": 0.9}}
    study = changed_study(tmp_path, changes, SMOKE)
    with pytest.raises(
        ValueError, match=r"^models\.tiny\.pretrain\.stop_accuracy: 0\.9 not reached"
    ):
        make_base(study, "tiny", tmp_path / "base")
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize(("more", "is_another"), [({"stop_accuracy": 0.2}, True), ({}, False)])
def test_a_base_that_stops_at_an_accuracy_is_one_of_a_length_of_answers(
    tmp_path: Path, more: dict[str, float], is_another: bool
) -> None:
    changes = CHANGES | {"models/tiny/pretrain": LEARNING | more}
    longer = changes | {"rl/rollout/max_response_tokens": 100}
    digests = {base_digest(changed_study(tmp_path, it, SMOKE), "tiny") for it in (changes, longer)}
    assert (len(digests) == 2) == is_another
