"""How long the runs of recorded studies took, by commit and machine, from their manifests."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from analysis.markdown import Row, markdown_table
from experiments.runs.attempts import list_run_dirs
from experiments.runs.manifest import RunManifest, read_manifest
from experiments.support.json_files import REMAKE

SECONDS_PER_HOUR = 3600
NOTE = (
    "Of each run's last attempt, without its base checkpoint and its evaluation. Runs at once: the "
    "most of these runs that went at the same time, on all machines together. *: some of these "
    "runs had been cut off before; the seconds of their first attempts are not counted."
)


def times_text(records: Path) -> str:
    """Markdown of all recorded studies."""
    by_origin: dict[tuple[str, str], list[RunManifest]] = {}
    for run_dir in (it for record in sorted(records.iterdir()) for it in list_run_dirs(record)):
        manifest = read_manifest(run_dir, REMAKE)
        by_origin.setdefault((manifest.study, made_by(manifest)), []).append(manifest)
    rows = [_row(*names, runs) for names, runs in by_origin.items()]
    return f"{markdown_table(rows)}\n\n{NOTE}\n"


def made_by(manifest: RunManifest) -> str:
    """Commit and machine of a run, in words."""
    machine = manifest.hardware
    commit = manifest.git.commit[:7] if manifest.git and manifest.git.commit else "not recorded"
    gpus = "".join(f", a run on {count} {name}" for name, count in Counter(machine.gpus).items())
    changed = " with uncommitted changes" if manifest.git and manifest.git.dirty else ""
    return f"commit {commit}{changed} on {machine.cores} cores of {machine.cpu}{gpus}"


def _row(study: str, origin: str, runs: Sequence[RunManifest]) -> Row:
    starts_s = [datetime.fromisoformat(it.attempt_started_at).timestamp() for it in runs]
    seconds = [it.wall_s or 0.0 for it in runs]  # those of a record are finished, and have it
    spans = [(start, start + it) for start, it in zip(starts_s, seconds, strict=True)]
    cut_off = " *" if any(it.attempt > 1 for it in runs) else ""
    # the most are at work at the start of one of them
    at_once = max(sum(start <= moment < end for start, end in spans) for moment in starts_s)
    return {
        "Study": f"`{study}`",
        "Runs": str(len(runs)),
        "Recorded at": origin,
        "A run, s": f"{min(seconds):.0f} to {max(seconds):.0f}{cut_off}",
        "Sum of runs, h": f"{sum(seconds) / SECONDS_PER_HOUR:.1f}",
        "Runs at once": str(at_once),
    }
