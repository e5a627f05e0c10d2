"""What a launch tells of a run while it trains, and the tracker that keeps nothing."""

from collections.abc import Sequence
from typing import Protocol

from experiments.runs.manifest import RunManifest
from experiments.runs.metrics import Row


class Tracker(Protocol):
    """Follows one attempt at a run."""

    def start(self, manifest: RunManifest, resumes: bool) -> None:
        """The attempt begins; `resumes` if another one came before it."""

    def log_rows(self, rows: Sequence[Row], timestamps_ms: Sequence[int]) -> None:
        """Metrics of some steps."""

    def finish(self, manifest: RunManifest) -> None:
        """The attempt has ended, as its manifest says."""


class Untracked:
    """Keeps nothing, for machines without MLflow; the files hold all that it would show.

    `python -m experiments.tracking.publish` adds such runs to a store later.
    """

    def start(self, manifest: RunManifest, resumes: bool) -> None:
        """Nothing."""

    def log_rows(self, rows: Sequence[Row], timestamps_ms: Sequence[int]) -> None:
        """Nothing."""

    def finish(self, manifest: RunManifest) -> None:
        """Nothing."""
