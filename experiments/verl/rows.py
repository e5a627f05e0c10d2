"""verl's record of its steps, read while it is written, in the form of this project's metrics, and
the gate that watches it: trainer and rollouts that have diverged would only cost GPU hours.
"""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.rl.metric_names import K3_KL, STEP_TIME
from experiments.runs.metrics import Row
from experiments.study.schema import KlGate

# verl's one worker of ours is the actor, so its peak is the run's
RENAMED = {"actor/perf/max_memory_allocated_gb": "perf/max_memory_allocated_gb"}


class Step(NamedTuple):
    """One training step; NaN is what verl wrote as null, so anything that is not finite."""

    number: int
    metrics: dict[str, float]


class StepReader:
    """Reads the lines that a file of verl's file logger has got since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes_read = 0

    def read_new(self) -> Iterator[Step]:
        """The training steps in the complete new lines."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.num_bytes_read)
            lines = [line for line in file if line.endswith(b"\n")]
        self.num_bytes_read += sum(map(len, lines))
        for line in lines:
            logged = json.loads(line)
            if STEP_TIME in logged["data"]:  # else a validation before the first step
                yield Step(logged["step"], to_metrics(logged["data"]))


def to_metrics(logged: dict[str, Any]) -> dict[str, float]:
    """verl's values by this project's keys, which are verl's but for `RENAMED` and for "@".

    MLflow takes no "@": as in verl's own MLflow logger it becomes "_at_". Text and lists stay in
    verl's record.
    """
    return {
        RENAMED.get(key, key).replace("@", "_at_"): math.nan if value is None else float(value)
        for key, value in logged.items()
        if value is None or isinstance(value, int | float)
    }


class GateWatch:
    """Counts the steps in a row beyond a gate."""

    def __init__(self, gate: KlGate | None, recorded: Iterable[Row] = ()) -> None:
        """`recorded` are the steps before the first that is watched: a run may resume often."""
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
