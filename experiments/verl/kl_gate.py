"""Stops a run whose trainer and rollouts have diverged: more steps would only cost GPU hours."""

from collections.abc import Iterable

from experiments.rl.metric_names import K3_KL
from experiments.runs.metrics import Row
from experiments.study.schema import KlGate
from experiments.verl.rows import Step


class GateWatch:
    """Counts the steps in a row beyond a gate.

    Args:
        gate: of the study, if it has one.
        recorded: the steps before the first one that is watched: a run may crash and resume often.
    """

    def __init__(self, gate: KlGate | None, recorded: Iterable[Row] = ()) -> None:
        self.gate = gate
        self.steps_beyond = 0
        for row in recorded:
            self._count(row[K3_KL])

    def _count(self, kl: float | None) -> None:
        is_within = self.gate is None or (kl is not None and kl <= self.gate.max_k3_kl)
        self.steps_beyond = 0 if is_within else self.steps_beyond + 1

    def reason_to_stop(self, step: Step) -> str | None:
        """Why the run ends with this step, or None. A KL that is not finite counts as beyond."""
        if self.gate is None:
            return None
        kl = step.metrics[K3_KL]
        self._count(kl)
        if self.steps_beyond < self.gate.steps:
            return None
        return (
            f"stopped: {K3_KL} beyond {self.gate.max_k3_kl:g} for {self.gate.steps} steps, "
            f"{kl:.3g} at step {step.number}"
        )
