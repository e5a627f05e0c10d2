"""verl's record of its steps, read while it is written, in the form of this project's metrics."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.rl.metric_names import STEP_TIME

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
