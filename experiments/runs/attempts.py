"""A run's history on disk: one folder per attempt, so that no crash loses what was measured.

`results/<run id>/attempts/<n>/` holds the attempt's manifest.json, metrics.jsonl and train.log.
Snakemake deletes a failed job's declared outputs but knows nothing of these; the run's own
metrics.jsonl and manifest.json are written from them when the run has finished.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.runs.manifest import MANIFEST, Digests, RunManifest, read_manifest
from experiments.runs.metrics import METRICS, Row, merge, read_jsonl, read_rows, require_every_step
from experiments.runs.record import has_file, open_record
from experiments.support.json_files import write_jsonl

STOP_FILE = "stop"  # in a run's folder: ends a run of verl, where a machine's time is over
OnStep = Callable[[int, dict[str, float]], None]  # called with step and metrics after each step
# an attempt's folder is the only copy of what was measured
HINT = "restore it, or delete the run's folder to train the run again"


class Attempt(NamedTuple):
    """One attempt at a run."""

    folder: Path

    @property
    def number(self) -> int:
        """1 for a run's first attempt."""
        return int(self.folder.name)

    @property
    def manifest(self) -> RunManifest:
        """Its provenance."""
        return read_manifest(self.folder, HINT)

    def append(self, row: Row) -> None:
        """Adds one step's metrics, on disk when this returns."""
        with (self.folder / METRICS).open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[Row]:
        """The metrics of its steps, without a last line that a crash cut short."""
        path = self.folder / METRICS
        return read_jsonl(path, HINT, may_be_cut=True) if path.exists() else []


def list_attempts(run_dir: Path) -> list[Attempt]:
    """The attempts at a run that got as far as a manifest, first to last."""
    return [one for one in _all_attempts(run_dir) if (one.folder / MANIFEST).exists()]


def next_attempt(run_dir: Path) -> Attempt:
    """A new, empty attempt folder."""
    last = max((attempt.number for attempt in _all_attempts(run_dir)), default=0)
    attempt = Attempt(run_dir / "attempts" / str(last + 1))
    attempt.folder.mkdir(parents=True)
    return attempt


def _all_attempts(run_dir: Path) -> list[Attempt]:
    """First to last; folders that a user has renamed do not count."""
    folders = (run_dir / "attempts").glob("*")
    attempts = [Attempt(folder) for folder in folders if folder.name.isdecimal()]
    return sorted(attempts, key=lambda attempt: attempt.number)


def resumable(attempts: list[Attempt], digests: Digests) -> list[Attempt]:
    """The unfinished attempts that a run with those digests resumes, first to last.

    A finished attempt is never resumed, and neither is one with another configuration, code or
    base checkpoint: its steps would be another experiment's.
    """
    found: list[Attempt] = []
    for attempt in reversed(attempts):
        manifest = attempt.manifest
        if manifest.status == "finished" or manifest.digests != digests:
            break
        found.insert(0, attempt)
    return found


def is_finished(attempts: list[Attempt], digests: Digests) -> bool:
    """Whether the last attempt has finished the run that has those digests."""
    if not attempts:
        return False
    manifest = attempts[-1].manifest
    return manifest.status == "finished" and manifest.digests == digests


def merge_rows(attempts: Iterable[Attempt]) -> list[Row]:
    """One row per step in ascending order; of a step done twice the later attempt's."""
    return merge(attempt.rows() for attempt in attempts)


def require_whole_history(attempts: Sequence[Attempt]) -> None:
    """Refuses attempts of which steps are lost, before they are resumed."""
    if attempts:
        folders = attempts[0].folder.parent
        require_every_step(merge_rows(attempts), f"{folders}/*/{METRICS}", HINT)


def is_run(run_dir: Path) -> bool:
    """Whether a run, of results or of a record, got as far as a manifest."""
    return has_file(run_dir, MANIFEST) or bool(list_attempts(run_dir))


def list_run_dirs(folder: Path) -> list[Path]:
    """The runs of results or of a record that got as far as a manifest."""
    record = open_record(folder)
    if record is not None:
        return [folder / run for run in record.runs]
    return [it for it in sorted(folder.glob("*_seed*")) if is_run(it)]


def read_history(run_dir: Path, keys: Collection[str] = ()) -> tuple[RunManifest, list[Row]]:
    """Manifest and merged metrics of a run, finished or not, or of a recorded one."""
    if not (attempts := list_attempts(run_dir)):
        return read_manifest(run_dir, HINT), read_rows(run_dir, HINT, keys)
    manifest = attempts[-1].manifest
    resumed = [a for a in attempts if a.manifest.started_at == manifest.started_at]
    rows = merge_rows(resumed)
    # of a stopped run an earlier attempt may have gone on, by other steps
    if manifest.was_stopped and (last := attempts[-1].rows()):
        steps = [row["step"] for row in rows]
        rows = rows[: steps.index(last[-1]["step"]) + 1]
    return manifest, rows


def write_results(run_dir: Path) -> None:
    """Writes a run's own metrics.jsonl and manifest.json from its last attempts."""
    manifest, rows = read_history(run_dir)
    require_every_step(rows, f"{run_dir}/attempts/*/{METRICS}", HINT, manifest.planned_steps)
    write_jsonl(run_dir / METRICS, rows)
    manifest.write(run_dir)
