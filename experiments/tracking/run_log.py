"""What a launch tells of a run while it trains: its attempt's file, MLflow and the terminal."""

import math
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

from experiments.rl.metric_names import K3_KL, REWARD, STEP_TIME, TOTAL_TOKENS
from experiments.runs.attempts import Attempt
from experiments.runs.manifest import RunManifest
from experiments.runs.metrics import Row

STEPS_OF_PACE = 5  # the time left follows the pace of the last steps


class Tracker:
    """Follows one attempt at a run; this one keeps nothing, for machines without MLflow.

    `python -m experiments.tracking rebuild` adds such runs to a store later: files hold all of it.
    """

    def start(self, manifest: RunManifest, resumes: bool) -> None:
        """The attempt begins; `resumes` if another one came before it."""

    def log_rows(self, rows: Sequence[Row], timestamps_ms: Sequence[int]) -> None:
        """Metrics of some steps."""

    def finish(self, manifest: RunManifest) -> None:
        """The attempt has ended, as its manifest says."""


class RunLog:
    """Where a run's metrics go while it trains."""

    def __init__(self, name: str, total_steps: int, attempt: Attempt, tracked: Tracker) -> None:
        self.name, self.total_steps = name, total_steps
        self.attempt, self.tracked = attempt, tracked
        self.step_times_s: deque[float] = deque(maxlen=STEPS_OF_PACE)

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Records one step; what is not finite counts as undefined."""
        row: Row = {"step": step}
        row |= {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self.attempt.append(row)
        self.tracked.log_rows([row], [int(time.time() * 1000)])
        self.step_times_s.append(metrics[STEP_TIME])
        mean_step_s = sum(self.step_times_s) / len(self.step_times_s)
        left = timedelta(seconds=round(mean_step_s * (self.total_steps - step)))
        # not perf/throughput: verl's is of one GPU
        tokens_per_s = metrics[TOTAL_TOKENS] / metrics[STEP_TIME]
        print(
            f"{self.name:<28} step {step:>3}/{self.total_steps}  "
            f"k3 KL {metrics[K3_KL]:.2e}  "
            f"reward {metrics[REWARD]:+.3f}  "
            f"{tokens_per_s:,.0f} tokens/s  {left} left",
            flush=True,
        )
