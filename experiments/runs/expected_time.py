"""How long a study will take, by its record."""

from statistics import fmean

from experiments.runs.attempts import list_run_dirs
from experiments.runs.manifest import read_manifest
from experiments.study.schema import ROOT, Study
from experiments.support.json_files import REMAKE

RECORDS = ROOT / "experiments" / "records"


def expected_time(study: Study) -> str:
    """One line: hours of all runs together, as long as a run of the record took on average."""
    recorded = [read_manifest(it, REMAKE) for it in list_run_dirs(RECORDS / study.study)]
    if not (seconds := [it.wall_s for it in recorded if it.wall_s is not None]):
        return "time: not known, as there is no record of this study"
    hours = fmean(seconds) * len(study.runs) / 3600
    machine = recorded[0].hardware
    name = machine.gpus[0] if machine.gpus else f"{machine.cores} cores of {machine.cpu}"
    return f"time: about {hours:.1f} h, the sum of all runs, as its record took ({name})"
