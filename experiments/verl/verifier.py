"""What decides verdicts on answers: in a run's digest and beside its evaluations."""

from experiments.rl.tasks import GENERATED_TASKS
from experiments.runs.provenance import versions
from experiments.verl.math_verifier import PACKAGES, RULE


def verifier_of(task: str) -> dict[str, str | None] | None:
    """Rule and versions of the verifier of a task's answers; None of a generated one.

    Those are compared by `experiments.rl.tasks`, with no other package.
    """
    if task in GENERATED_TASKS:
        return None
    installed = versions()
    return {"rule": str(RULE)} | {package: installed[package] for package in PACKAGES}
