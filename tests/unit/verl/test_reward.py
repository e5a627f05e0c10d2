"""Rewards: known answers, many threads, endless answers, equal ones however they are written."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from analysis.load import load_results
from experiments.launch.digests import lock_digest
from experiments.rl.config import TaskConfig
from experiments.rl.tasks import make_problems, score
from experiments.study.load import load_study
from experiments.study.schema import STUDIES
from experiments.verl import math_verifier, reward, verifier
from experiments.verl.math_verifier import MathVerifier
from experiments.verl.reward import compute_score
from experiments.verl.sources import HUB_FILES
from experiments.verl.written_forms import comparable
from tests.files import edit_json
from tests.math_table import BLOCK, FLAWED, FORMS, PAGE, tables
from tests.unit.analysis.synthetic_results import shortened, write_results

# 10 billion digits, in one operation that no signal handler interrupts
ENDLESS = r"Answer: $10^{10^{10}}$"
RIGHT = {"score": 1.0, "acc": 1.0}


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("So it is 34.\nAnswer: 34", True),
        ("answer :  $34$.", True),
        ("**Answer:** 34", True),
        ("**Answer**: 34", True),
        ("Answer: .34", False),
        (r"Answer: \boxed{34}", True),
        (r"Answer: \frac{68}{2}", True),
        ("Answer: 34\nno, Answer: 35", False),
        ("Answer: 34" + " well" * 100, False),
        ("The answer is 34", False),
        ("Answer: $Answer", False),
        (r"Answer: \frac{68}{", False),
        (r"Answer: }{\left(", False),
        (r"Answer: \frac{1}{0}", False),
        ("Answer:", False),
        ("", False),
    ],
)
def test_mathematics_scores_one_or_minus_one(response: str, right: bool) -> None:
    scored = compute_score("aime-2024", response, "34", {"index": 0}, reward_router_address=None)
    assert scored == (RIGHT if right else {"score": -1.0, "acc": 0.0})


@pytest.mark.parametrize("name", ["chain-sum", "word-problem"])
def test_generated_tasks_score_as_in_the_local_trainer(name: str) -> None:
    task = TaskConfig(name=name, train_prompts=20, test_prompts=1)
    for problem in make_problems(task, "train"):
        for response in (problem.worked, problem.direct, problem.direct + "1", ""):
            expected = score(task, response, problem.answer)
            found = compute_score(name, response, problem.answer)
            assert found == {"score": expected, "acc": expected}


def test_threads_get_their_own_verdicts_and_an_endless_answer_ends() -> None:
    responses = [f"Answer: {i % 7}" for i in range(70)]
    responses[35] = ENDLESS
    started = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        scores = list(threads.map(lambda r: compute_score("aime-2024", r, "3")["acc"], responses))
    assert scores == [float(i % 7 == 3 and i != 35) for i in range(70)]
    # the limit, two starts of the child (0.4 s each) and 70 comparisons of some milliseconds
    assert time.monotonic() - started < math_verifier.TIME_LIMIT_S + 15


def test_verifier_that_cannot_run_is_an_error_and_no_wrong_answer(tmp_path, monkeypatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('not installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="ended with exit code 1"):
        math_verifier.MathVerifier().is_right(r"\boxed{34}", "34")


def test_a_verifier_killed_while_idle_is_started_again() -> None:
    verifier = math_verifier.MathVerifier()
    assert verifier.is_right(r"\boxed{34}", "34")
    verifier._child.kill()
    verifier._child.wait()
    assert verifier.is_right(r"\boxed{34}", "34")


def is_running(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


PARENT = r"""
from experiments.verl.math_verifier import MathVerifier
verifier = MathVerifier()
print(verifier.is_right(r"\boxed{1}", "1"), verifier._child.pid, flush=True)
input()
"""


def test_child_ends_with_a_killed_parent() -> None:
    command, pipe = [sys.executable, "-c", PARENT], subprocess.PIPE
    parent = subprocess.Popen(command, cwd=math_verifier.ROOT, stdin=pipe, stdout=pipe, text=True)
    verdict, child = parent.stdout.readline().split()
    parent.kill()
    parent.communicate()
    assert verdict == "True"
    deadline = time.monotonic() + 10
    while is_running(int(child)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(child))


def test_verl_loads_the_function_from_its_file() -> None:
    imports = pytest.importorskip("verl.utils.import_utils", reason="needs verl")
    loaded = imports.load_extern_object(module_path=reward.__file__, object_name="compute_score")
    assert loaded(data_source="math_dapo", solution_str="Answer: 1", ground_truth="1") == RIGHT


@pytest.mark.parametrize(
    ("response", "by_text", "by_value"),
    [("Answer: 34", True, True), ("Answer: 034", False, True), ("Answer: 35", False, False)],
)
def test_the_published_rule_compares_texts(response: str, by_text: bool, by_value: bool) -> None:
    pytest.importorskip("verl", reason="needs requirements/engines.txt")
    for rule, right in (("math_dapo", by_text), ("math-verify", by_value)):
        expected = {"score": 1.0 if right else -1.0, "acc": float(right)}
        assert compute_score("math_dapo", response, "34", rule=rule) == expected


def test_another_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reward_kwargs\.rule: exact; use math-verify or"):
        compute_score("math_dapo", "Answer: 34", "34", rule="exact")


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
    assert compute_score("chain-sum", "1+2=3>3<|im_end|>", "3") == RIGHT


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
    verified = {"verifier": verifier.verifier_of("dapo-math")}
    assert verified["verifier"]["rule"] == "4"
    edit_json(path, lambda rows: [row.update(verified) for row in rows])
    with pytest.raises(
        ValueError, match=r"eval\.json: verifier: .*'rule': '4'.*: their verdicts do"
    ):
        load_results(study, tmp_path)


def test_right_is_plus_one_and_wrong_minus_one_on_the_responses_tokens() -> None:
    algorithms = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl")
    import qat_core.verl.advantage  # noqa: F401  # registers it

    rewards_BT = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    mask_BT = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    estimate = algorithms.get_adv_estimator_fn("reward")
    advantages_BT, returns_BT = estimate(
        token_level_rewards=rewards_BT, response_mask=mask_BT, index=None, config=None
    )
    assert advantages_BT.tolist() == [[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]]
    assert torch.equal(returns_BT, advantages_BT)


@pytest.mark.parametrize("name", ["chain_sum", "openai/gsm8k", "codecontests", ""])
def test_answers_of_a_source_without_a_rule_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^data_source: {name}: .*: write dapo-math/NAME"):
        compute_score(name, "Answer: 34", "34")


def test_all_sources_of_a_studys_rows_have_a_rule() -> None:
    names = {file.name for files in HUB_FILES.values() for file in files}
    for name in (*names, "dapo-math", "dapo-math/chain-sum"):
        assert compute_score(name, "Answer: 34", "34") == RIGHT
