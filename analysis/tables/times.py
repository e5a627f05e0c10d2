"""How long the runs of recorded studies took, by commit and machine, from their manifests."""

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from analysis.markdown import MarkdownTable
from experiments.runs.attempts import list_run_dirs
from experiments.runs.manifest import RunManifest, read_manifest
from experiments.support.json_files import REMAKE

SECONDS_PER_HOUR = 3600
NOTE = (
    "Of each run's last attempt, without its base checkpoint and its evaluation. Runs at once: the "
    "most of these runs that went at the same time, on all machines together. *: some of these "
    "runs had been cut off before; the seconds of their first attempts are not counted."
)


class Interval(NamedTuple):
    """When a run's last attempt ran, in seconds since 1970."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end_s - self.start_s


class Times(NamedTuple):
    """Runs of one study, made at one commit on one kind of machine."""

    study: str
    origin: str
    intervals: list[Interval]
    was_cut_off: bool

    @property
    def at_once(self) -> int:
        """The most runs at a time; that is so at the start of one of them."""
        starts = [it.start_s for it in self.intervals]
        return max(sum(it.start_s <= s < it.end_s for it in self.intervals) for s in starts)

    @property
    def shortest_to_longest(self) -> str:
        """Seconds of a run."""
        seconds = [it.seconds for it in self.intervals]
        return f"{min(seconds):.0f} to {max(seconds):.0f}{' *' if self.was_cut_off else ''}"

    @property
    def hours(self) -> float:
        """Of all runs."""
        return sum(it.seconds for it in self.intervals) / SECONDS_PER_HOUR


TABLE: MarkdownTable[Times] = MarkdownTable(
    {
        "Study": lambda row: f"`{row.study}`",
        "Runs": lambda row: str(len(row.intervals)),
        "Recorded at": lambda row: row.origin,
        "A run, s": lambda row: row.shortest_to_longest,
        "Sum of runs, h": lambda row: f"{row.hours:.1f}",
        "Runs at once": lambda row: str(row.at_once),
    }
)


def times_text(records: Path) -> str:
    """Markdown of all recorded studies.

    Raises:
        ValueError: a manifest is damaged.
    """
    by_origin: dict[tuple[str, str], list[RunManifest]] = {}
    for run_dir in (it for record in sorted(records.iterdir()) for it in list_run_dirs(record)):
        manifest = read_manifest(run_dir, REMAKE)
        by_origin.setdefault((manifest.study, made_by(manifest)), []).append(manifest)
    rows = [
        Times(*names, [_interval(it) for it in runs], any(it.attempt > 1 for it in runs))
        for names, runs in by_origin.items()
    ]
    return f"{TABLE.markdown(rows)}\n\n{NOTE}\n"


def made_by(manifest: RunManifest) -> str:
    """Commit and machine of a run, in words."""
    machine = manifest.hardware
    commit = manifest.git.commit[:7] if manifest.git and manifest.git.commit else "not recorded"
    gpus = "".join(f", a run on {count} {name}" for name, count in Counter(machine.gpus).items())
    changed = " with uncommitted changes" if manifest.git and manifest.git.dirty else ""
    return f"commit {commit}{changed} on {machine.cores} cores of {machine.cpu}{gpus}"


def _interval(manifest: RunManifest) -> Interval:
    assert manifest.wall_s is not None, "runs of a record are finished"
    start_s = datetime.fromisoformat(manifest.attempt_started_at).timestamp()
    return Interval(start_s, start_s + manifest.wall_s)
