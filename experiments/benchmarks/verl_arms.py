"""All runs of verl studies with random weights, one after the other, into one record.

    python -m experiments.benchmarks.verl_arms RECORD.json RESULTS STUDY.yaml ...

Ranks draw the weights of their base themselves (`seeded_base`), and nothing is evaluated: what is
measured are mismatch, memory and time. The record is written again after every run that has a
second step. The same command goes on where it was interrupted; a run that was cut off, which has no
checkpoint, begins again.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from experiments.benchmarks.seeded_base import write_seeded_base
from experiments.benchmarks.verl_steps import write_record
from experiments.runs.attempts import list_attempts, read_history
from experiments.runs.manifest import MANIFEST
from experiments.study.load import load_study
from experiments.study.schema import Study
from experiments.support.cli import run_cli
from experiments.verl.data import write_data


def make_inputs(study: Study, results: Path) -> None:
    """Data and bases of a study, where they are not there yet.

    Raises:
        ValueError: it has a model whose weights are not random.
    """
    data = results / "data" / study.study
    if not data.exists():
        write_data(study.task, data)
    for model in study.models:
        base = results / "base" / model
        if not (base / MANIFEST).exists():
            write_seeded_base(study, model, base)


def run_arms(files: list[Path], results: Path, record: Path, deadline: float) -> list[str]:
    """Runs the studies in order and records; returns the runs that did not get to their end.

    Args:
        files: of the studies.
        results: folder of all runs.
        record: file that is written.
        deadline: time of `time.monotonic` after which no run is begun.
    """
    studies = [(file, load_study(file)) for file in files]
    for _, study in studies:
        make_inputs(study, results)
    (results / "logs").mkdir(exist_ok=True)
    runs = [(file, run.id) for file, study in studies for run in study.runs]
    for file, name in runs:
        if time.monotonic() > deadline:
            break
        options = {"--study": file, "--run": name, "--results": results}
        options |= {"--log": results / "logs" / f"{name}.log"}
        words = [str(word) for option in options.items() for word in option]
        program = [sys.executable, "-m", "experiments.launch.run", "--untracked", *words]
        subprocess.run(program, check=False)  # what went wrong is in the run's manifest
        if measured := [results / name for _, name in runs if _has_second_step(results / name)]:
            write_record(record, measured)
    return [name for _, name in runs if not (results / name / MANIFEST).exists()]


def _has_second_step(run_dir: Path) -> bool:
    return bool(list_attempts(run_dir)) and len(read_history(run_dir)[1]) > 1


def main() -> None:
    """Parses the command line; exit code 1 where runs are missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("results", type=Path, help="folder of runs, made if it is not there")
    parser.add_argument("studies", type=Path, nargs="+", help="study files with trainer: verl")
    parser.add_argument(
        "--begin-within-s", type=float, default=float("inf"), help="begin no run later than that"
    )
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.begin_within_s
    missing = run_arms(arguments.studies, arguments.results, arguments.record, deadline)
    print(f"not complete: {', '.join(missing) or 'none'}", flush=True)
    sys.exit(bool(missing))


if __name__ == "__main__":
    run_cli(main)
