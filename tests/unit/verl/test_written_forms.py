"""Answers that are equal are right however they are written, with any ANTLR runtime."""

import json
from pathlib import Path

import pytest

from analysis.load import load_results
from experiments.launch.digests import lock_digest
from experiments.runs.evaluation import Evaluation
from experiments.study.load import load_study
from experiments.study.schema import STUDIES
from experiments.verl import verifier
from experiments.verl.math_verifier import MathVerifier
from experiments.verl.reward import compute_score
from experiments.verl.written_forms import comparable
from tests.math_table import BLOCK, FLAWED, FORMS, PAGE, tables
from tests.unit.analysis.synthetic_results import shortened, write_results

VERIFIER = MathVerifier()
CASES = [
    (form.right, answer, is_equal)
    for form in FORMS
    for is_equal, answers in ((True, form.equal), (False, form.other))
    for answer in answers
]


@pytest.mark.parametrize(("right", "answer", "is_equal"), CASES)
def test_an_answer_counts_as_the_table_says(right: str, answer: str, is_equal: bool) -> None:
    assert VERIFIER.is_right(rf"\boxed{{{answer}}}", right) == is_equal


@pytest.mark.parametrize(("response", "is_right"), FLAWED.items())
def test_a_response_counts_as_the_table_says(response: str, is_right: bool) -> None:
    assert compute_score("aime-2024", response, "42")["acc"] == is_right


@pytest.mark.parametrize(("right", "answer", "is_equal"), CASES)
def test_no_percent_sign_reaches_the_grammars_that_differ_in_it(
    right: str, answer: str, is_equal: bool
) -> None:
    for pair in comparable(answer, right):
        assert not any("%" in text or "percent" in text for text in pair)


def test_the_page_has_the_table_of_the_tests() -> None:
    assert BLOCK.findall(PAGE.read_text()) == [tables()], "run python -m tests.math_table"


def test_an_end_of_turn_costs_no_reward_of_a_generated_task() -> None:
    assert compute_score("chain-sum", "1+2=3>3<|im_end|>", "3") == {"score": 1.0, "acc": 1.0}


def test_another_verifier_is_another_experiment_of_mathematics_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    studies = [load_study(STUDIES / f"{name}.yaml") for name in ("qwen3", "verl_nano")]
    assert [study.task.name for study in studies] == ["dapo-math", "chain-sum"]
    before = [lock_digest(study) for study in studies]
    changed = verifier.versions() | {"antlr4-python3-runtime": "4.13.2"}
    monkeypatch.setattr(verifier, "versions", lambda: changed)
    after = [lock_digest(study) for study in studies]
    assert before[0] != after[0] and before[1] == after[1]


def test_evaluations_tell_their_verifier_and_several_are_not_compared(tmp_path: Path) -> None:
    study = shortened(load_study(STUDIES / "default_long.yaml"), 20, 64)
    write_results(study, tmp_path)
    assert "verifier" not in load_results(study, tmp_path).evals
    path = tmp_path / study.runs[0].id / "eval.json"
    rows = [
        row | {"verifier": verifier.verifier_of("dapo-math")}
        for row in json.loads(path.read_text())
    ]
    assert Evaluation.model_validate(rows[0]).verifier["rule"] == "4"
    path.write_text(json.dumps(rows))
    with pytest.raises(
        ValueError, match=r"eval\.json: verifier: .*'rule': '4'.*: their verdicts do"
    ):
        load_results(study, tmp_path)
