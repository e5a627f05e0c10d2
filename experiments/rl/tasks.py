"""Verifiable tasks: problems with one right answer, and the check of a response.

`chain-sum` is made for nano models: a character-level sum whose answer may be given at once
(`>42`) or after the running sums (`12+19=31;31+11=42>42`), so that a model can learn to think.
`word-problem` asks the same in English for pretrained chat models. Either way a bare number counts.

Both are drawn here rather than from a generator package: reasoning-gym would bring eleven more
packages, one of them compiled, for the forty lines that chain sums take.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Literal

from experiments.rl.config import TaskConfig

Split = Literal["train", "test"]
ALPHABET = "0123456789+-=;>?"
NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:\.\d+)?")  # of 10-42 the last is 42


@dataclass(frozen=True)
class Question:
    """A prompt and its one right answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Problem(Question):
    """A question with two right responses."""

    worked: str  # derives the answer step by step
    direct: str  # states the answer at once


def make_problems(task: TaskConfig, split: Split) -> list[Problem]:
    """The task's problems of one split, the same on every machine; no test prompt is in train."""
    if task.name not in _DRAWERS:
        raise ValueError(f"task.name: {task.name} has no generator here; choose {GENERATED_TASKS}")
    wanted = task.test_prompts + task.train_prompts
    problems = _first_problems(task)
    if len(problems) < wanted:
        raise ValueError(
            f"task: terms {task.terms} and largest {task.largest} give only {len(problems)} "
            f"different problems, not {wanted}; widen them or lower train_prompts"
        )
    return problems[: task.test_prompts] if split == "test" else problems[task.test_prompts :]


def have_new_sums(task: TaskConfig) -> list[bool]:
    """Of each test problem, whether no training problem is worked out alike; of chain sums all."""
    trained = {problem.worked for problem in make_problems(task, "train")}
    return [problem.worked not in trained for problem in make_problems(task, "test")]


def score(task: TaskConfig, response: str, answer: str) -> float:
    """Reward of a response: 1 if its final answer is right, else 0."""
    if task.name == "chain-sum":
        return float(response.rpartition(">")[2] == answer)
    numbers = NUMBER.findall(response.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(answer))


@cache  # digests and trainers ask for them, and the runs of a job
def _first_problems(task: TaskConfig) -> list[Problem]:
    return list(islice(_unique_problems(task), task.test_prompts + task.train_prompts))


def _unique_problems(task: TaskConfig) -> Iterator[Problem]:
    """First test problems, then training problems, as long as new ones are soon found."""
    rng = random.Random(f"{task.name} {task.terms} {task.largest}")
    prompts: set[str] = set()
    tested: set[str] = set()
    for _ in range(100 * (task.test_prompts + task.train_prompts)):
        problem = _DRAWERS[task.name](rng, task)
        if problem.prompt in prompts or problem.worked in tested:
            continue
        if task.held_out == "sum" and len(prompts) < task.test_prompts:
            tested.add(problem.worked)
        prompts.add(problem.prompt)
        yield problem


def _draw_chain(rng: random.Random, task: TaskConfig) -> tuple[list[int], list[int]]:
    """Signed terms and their running sums, which stay between 0 and `largest`."""
    terms = [rng.randint(1, task.largest)]
    sums = [terms[0]]
    for _ in range(rng.randint(*task.terms) - 1):
        lowest, highest = -sums[-1], task.largest - sums[-1]
        terms.append(rng.choice([t for t in range(lowest, highest + 1) if t != 0]))
        sums.append(sums[-1] + terms[-1])
    return terms, sums


def _chain_sum(rng: random.Random, task: TaskConfig) -> Problem:
    terms, sums = _draw_chain(rng, task)
    steps = [f"{before}{term:+d}={after}" for before, term, after in _transitions(terms, sums)]
    prompt = f"{terms[0]}" + "".join(f"{term:+d}" for term in terms[1:]) + "?"
    direct = f">{sums[-1]}"
    return Problem(prompt, str(sums[-1]), ";".join(steps) + direct, direct)


def _word_problem(rng: random.Random, task: TaskConfig) -> Problem:
    terms, sums = _draw_chain(rng, task)
    name = rng.choice(("Anna", "Ben", "Clara", "David", "Emma", "Farid"))
    thing = rng.choice(("apples", "books", "coins", "marbles", "pens", "shells"))
    changes = [
        f"{name} gets {term} more" if term > 0 else f"{name} gives away {-term}"
        for term in terms[1:]
    ]
    prompt = f"{name} has {terms[0]} {thing}. {'. '.join(changes)}. How many {thing} are left?"
    steps = [
        f"{before} {'+' if term > 0 else '-'} {abs(term)} = {after}."
        for before, term, after in _transitions(terms, sums)
    ]
    direct = f"The answer is {sums[-1]}."
    return Problem(prompt, str(sums[-1]), f"{' '.join(steps)} {direct}", direct)


def _transitions(terms: list[int], sums: list[int]) -> Iterator[tuple[int, int, int]]:
    return zip(sums[:-1], terms[1:], sums[1:], strict=True)


_DRAWERS = {"chain-sum": _chain_sum, "word-problem": _word_problem}
GENERATED_TASKS = tuple(_DRAWERS)
