"""Stops a run whose trainer and rollouts have diverged: more steps would only cost GPU hours."""

from experiments.study.schema import KlGate
from experiments.verl.rows import Step
from qat_core.rl.metric_names import K3_KL


class GateWatch:
    """Counts the steps in a row beyond a gate."""

    def __init__(self, gate: KlGate | None) -> None:
        self.gate = gate
        self.steps_beyond = 0

    def reason_to_stop(self, step: Step) -> str | None:
        """Why the run ends with this step, or None. A KL that is not finite counts as beyond."""
        if self.gate is None:
            return None
        kl = step.metrics[K3_KL]
        self.steps_beyond = 0 if kl <= self.gate.max_k3_kl else self.steps_beyond + 1
        if self.steps_beyond < self.gate.steps:
            return None
        return (
            f"stopped: {K3_KL} beyond {self.gate.max_k3_kl:g} for {self.gate.steps} steps, "
            f"{kl:.3g} at step {step.number}"
        )
