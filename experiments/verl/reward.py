"""verl's reward function: the task's own verifier, or math-verify for mathematics.

reward.custom_reward_function.path=experiments/verl/reward.py
reward.custom_reward_function.name=compute_score
"""

import re
from typing import Any

from experiments.rl.config import TaskConfig
from experiments.rl.tasks import GENERATED_TASKS, score
from experiments.verl.math_verifier import MathVerifier
from experiments.verl.written_forms import BOX, END_OF_TURN

# As in DAPO: the answer ends the response, so that an early guess does not count.
ANSWER_TAIL_CHARS = 300
# data_source of a row, or what stands before its first slash
MATHEMATICS = ("dapo-math", "math_dapo", "aime-2024", "aime-2025")
ANSWER_LINE = re.compile(r"answer\**\s*:\s*([^\n]+)", re.IGNORECASE)

_VERIFIER = MathVerifier()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    rule: str = "math-verify",
    **_: Any,
) -> dict[str, float]:
    """Reward and accuracy of one response; to be called from any thread.

    Args:
        data_source: a generated task's name, or one of mathematics.
        solution_str: the response, without special tokens.
        ground_truth: the right answer.
        extra_info: not used; verl gives it, and more.
        rule: "math-verify", or "math_dapo" for the comparison of texts that verl's published
            recipe uses; set in `reward.custom_reward_function.reward_kwargs`.

    Returns:
        `score`: what the local trainer gives for a generated task, else DAPO's 1 or -1; `acc`: 1
        if the answer is right, else 0.

    Raises:
        ValueError: a data source whose answers have no rule here, or another rule.
    """
    if data_source in GENERATED_TASKS:
        said = END_OF_TURN.sub("", solution_str)
        right = score(TaskConfig(name=data_source), said, ground_truth)
        return {"score": right, "acc": right}
    if data_source.partition("/")[0] not in MATHEMATICS:
        raise ValueError(
            f"data_source: {data_source}: its answers have no rule here: write dapo-math/NAME in "
            "the rows if they are mathematics, else use another reward.custom_reward_function"
        )
    if rule == "math_dapo":
        return _score_of_dapo(solution_str, ground_truth)
    if rule != "math-verify":
        raise ValueError(f"reward_kwargs.rule: {rule}; use math-verify or math_dapo")
    answer = final_answer(solution_str)
    is_right = answer is not None and _VERIFIER.is_right(answer, ground_truth)
    return {"score": 1.0 if is_right else -1.0, "acc": float(is_right)}


def _score_of_dapo(response: str, right: str) -> dict[str, float]:
    """verl's own, without the extracted answer, which is text."""
    from verl.utils.reward_score import math_dapo

    found = math_dapo.compute_score(response, right)
    return {"score": float(found["score"]), "acc": float(found["acc"])}


def final_answer(response: str) -> str | None:
    r"""The answer in a box: of the last line `Answer: ...`, else the last box, or None."""
    tail = END_OF_TURN.sub("", response)[-ANSWER_TAIL_CHARS:]
    lines = ANSWER_LINE.findall(tail)
    if lines:
        answer = lines[-1].lstrip(" *").rstrip(" *.")  # .5 begins with a dot
        return rf"\boxed{{{answer}}}"
    boxes = list(BOX.finditer(tail))
    return tail[boxes[-1].start() :] if boxes else None
