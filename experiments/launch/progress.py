"""How far a study is, by what it has left on disk, and how long it takes, by its record."""

import time
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from experiments.runs.attempts import list_run_dirs
from experiments.runs.evaluation import EVALUATIONS
from experiments.runs.manifest import MANIFEST, read_manifest
from experiments.runs.metrics import METRICS
from experiments.study.schema import ROOT, Run, Study
from experiments.support.json_files import REMAKE

RECORDS = ROOT / "experiments" / "records"
TRAINING = 0.8  # share of a run's time; the rest is its evaluation
PRETRAINED = 2.5  # runs that a base takes as long as


class Progress:
    """Follows a study from now on."""

    def __init__(self, study: Study, results: Path) -> None:
        self.study, self.results = study, results
        self.started, self.started_at = time.monotonic(), time.time()
        self.pretrained = [
            name
            for name, base in study.bases.items()
            if getattr(study.models[base.model], "pretrain", None)
        ]
        self.at_start = self._made()

    def beforehand(self) -> str:
        """What will be run, how long that may take, and what appears where."""
        runs, folder = self.study.runs, self.results / "studies" / self.study.study
        left = sum(self._share(run) < 1 for run in runs)
        return (
            f"Study {self.study.study}: {len(runs)} runs, {left} to go; "
            f"{expected_time(self.study)}; on this machine: told as it goes. "
            f"Claims, figures and report: {folder}; each run: {self.results}/<run>; "
            "all in MLflow: make ui"
        )

    def line(self) -> str:
        """Runs done and in work, time spent and left."""
        shares = [self._share(run) for run in self.study.runs]
        done, in_work = sum(it == 1 for it in shares), sum(0 < it < 1 for it in shares)
        spent_s, made = time.monotonic() - self.started, self._made()
        missing = len(shares) + PRETRAINED * len(self.pretrained) - made
        left = "time left known after the first base models or steps"
        if done == len(shares):
            left = "judging and drawing"
        elif made > self.at_start:
            left_s = spent_s * missing / (made - self.at_start)
            left = f"about {timedelta(seconds=round(left_s))} left"
        spent = timedelta(seconds=round(spent_s))
        return f"{done} of {len(shares)} runs done, {in_work} in work, {spent} so far, {left}"

    def _made(self) -> float:
        """How much is done, in runs."""
        bases = sum((self.results / "base" / it / MANIFEST).exists() for it in self.pretrained)
        return PRETRAINED * bases + sum(map(self._share, self.study.runs))

    def _share(self, run: Run) -> float:
        """How much of a run is done, from 0 to 1."""
        folder = self.results / run.id
        manifest, evaluated = folder / MANIFEST, folder / EVALUATIONS
        if manifest.exists():
            newer = evaluated.exists() and evaluated.stat().st_mtime >= manifest.stat().st_mtime
            return 1.0 if newer else TRAINING
        files = sorted(folder.glob(f"attempts/*/{METRICS}"), key=lambda it: it.stat().st_mtime)
        if not files or files[-1].stat().st_mtime < self.started_at:
            return 0.0
        steps = files[-1].read_bytes().count(b"\n")
        return TRAINING * min(1.0, steps / self.study.rl_of(run.cell).steps)


def expected_time(study: Study) -> str:
    """One line: hours of all runs together, as long as a run of the record took on average."""
    recorded = [read_manifest(it, REMAKE) for it in list_run_dirs(RECORDS / study.study)]
    if not (seconds := [it.wall_s for it in recorded if it.wall_s is not None]):
        return "time: not known, as there is no record of this study"
    hours = fmean(seconds) * len(study.runs) / 3600
    machine = recorded[0].hardware
    name = machine.gpus[0] if machine.gpus else f"{machine.cores} cores of {machine.cpu}"
    return f"time: about {hours:.1f} h, the sum of all runs, as its record took ({name})"
