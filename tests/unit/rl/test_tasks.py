"""The tasks: worked answers are right, splits are apart, wrong answers score nothing."""

import re

import pytest

from experiments.rl.config import TaskConfig
from experiments.rl.tasks import ALPHABET, have_new_sums, make_problems, score

CHAIN = TaskConfig(name="chain-sum", terms=(3, 6), largest=9, train_prompts=300, test_prompts=50)
WORDS = TaskConfig(name="word-problem", terms=(2, 3), largest=10, train_prompts=90, test_prompts=9)
TASKS = pytest.mark.parametrize("task", [CHAIN, WORDS], ids=lambda task: task.name)


@TASKS
def test_worked_answers_score_and_others_do_not(task: TaskConfig) -> None:
    for problem in make_problems(task, "train"):
        assert score(task, problem.worked, problem.answer) == 1
        assert score(task, problem.direct, problem.answer) == 1
        head, _, tail = problem.worked.rpartition(problem.answer)
        wrong = f"{head}{int(problem.answer) + 1}{tail}"
        assert score(task, wrong, problem.answer) == 0
        assert score(task, "", problem.answer) == 0


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("The answer is 5.", True),
        ("The answer is 2.5.", False),
        ("It is 5.0 in all", True),
        ("that is 10-5", True),
        ("that is -5", False),
        ("1,005", False),
        ("five", False),
    ],
)
def test_the_last_number_of_a_text_is_its_answer(response: str, right: bool) -> None:
    assert score(WORDS, response, "5") == right


@TASKS
def test_splits_are_reproducible_and_disjoint(task: TaskConfig) -> None:
    train, test = make_problems(task, "train"), make_problems(task, "test")
    assert train == make_problems(task, "train")
    assert (len(train), len(test)) == (task.train_prompts, task.test_prompts)
    assert not {p.prompt for p in train} & {p.prompt for p in test}


def test_chain_sums_are_sums() -> None:
    for problem in make_problems(CHAIN, "train"):
        expression = problem.prompt.removesuffix("?")
        assert eval(expression) == int(problem.answer)
        assert set(problem.prompt + problem.worked) <= set(ALPHABET)
        for step in problem.worked.partition(">")[0].split(";"):
            left, right = step.split("=")
            assert eval(left) == int(right)


def test_sums_that_training_has_with_other_words_are_known() -> None:
    assert all(have_new_sums(CHAIN))
    task = TaskConfig(name="word-problem", terms=(2, 3), largest=20, train_prompts=4096)
    numbers = re.compile(r"\d+|more|away")
    trained = {tuple(numbers.findall(p.prompt)) for p in make_problems(task, "train")}
    asked = [tuple(numbers.findall(p.prompt)) for p in make_problems(task, "test")]
    are_new = have_new_sums(task)
    assert are_new == [it not in trained for it in asked]
    assert 0 < sum(are_new) < len(are_new)


def test_held_out_sums_are_asked_once() -> None:
    many = WORDS.model_copy(update={"train_prompts": 900})
    task = many.model_copy(update={"held_out": "sum"})
    test = [problem.worked for problem in make_problems(task, "test")]
    assert len(set(test)) == task.test_prompts
    assert len(make_problems(task, "train")) == task.train_prompts
    assert not all(have_new_sums(many))
    assert all(have_new_sums(task))


def test_too_few_problems_of_other_sums_are_refused() -> None:
    few = TaskConfig(name="word-problem", terms=(1, 1), largest=3, test_prompts=2, train_prompts=50)
    assert len(make_problems(few, "train")) == 50
    with pytest.raises(ValueError, match="give only 38 different problems, not 52"):
        make_problems(few.model_copy(update={"held_out": "sum"}), "train")


def test_digests_of_older_runs_know_no_held_out_sums() -> None:
    assert "held_out" not in WORDS.model_dump()
    assert WORDS.model_copy(update={"held_out": "sum"}).model_dump()["held_out"] == "sum"
