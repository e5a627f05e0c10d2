"""A reward that a model with random weights gets too, so that each step changes its weights."""

from typing import Any


def compute_score(solution_str: str, **_: Any) -> dict[str, float]:
    """Share of digits among a response's characters."""
    score = sum(map(str.isdigit, solution_str)) / max(1, len(solution_str))
    return {"score": score, "acc": score}
