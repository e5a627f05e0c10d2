"""`python -m experiments.runs.record`: a finished study's small results, in the form to commit.

From these alone the claims, the figures and the MLflow view can be made again.
"""

import argparse
import shutil
from pathlib import Path

from experiments.runs.attempts import read_history
from experiments.runs.manifest import read_manifest
from experiments.runs.metrics import RECORDED_METRICS, write_csv
from experiments.study.load import load_study
from experiments.study.schema import ROOT
from experiments.support.cli import RESULTS, STUDY, run_cli
from experiments.support.json_files import REMAKE


def record_study(study_file: Path, results: Path, records: Path) -> Path:
    """Copies a study's results into `records`; returns the study's folder there.

    Raises:
        ValueError: a run is missing, not finished and evaluated, or has other settings.
    """
    study = load_study(study_file)
    study_dir, record = results / "studies" / study.study, records / study.study
    sources = [results / run.id for run in study.runs]
    wanted = [source / name for source in sources for name in ("manifest.json", "eval.json")]
    wanted.append(study_dir / "claims.json")
    missing = [str(path) for path in wanted if not path.is_file()]
    if missing:
        raise ValueError(f"{missing[0]}: missing; run study {study.study} to its end first")
    for run in study.runs:
        if read_manifest(results / run.id, REMAKE).config != study.training_config(run):
            raise ValueError(
                f"{results / run.id}: trained with other settings than {study_file}; run the "
                "study again"
            )
    shutil.rmtree(record, ignore_errors=True)
    for source in sources:
        _record_run(source, record / source.name)
    shutil.copy(study_dir / "claims.json", record)
    shutil.copy(study_file, record / "study.yaml")
    return record


def _record_run(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    _, rows = read_history(source)
    write_csv(target / RECORDED_METRICS, rows)
    for name in ("manifest.json", "eval.json"):
        shutil.copy(source / name, target)


def main() -> None:
    """Parses the command line and records one study."""
    parser = argparse.ArgumentParser(description=__doc__, parents=[STUDY, RESULTS])
    parser.add_argument("--records", type=Path, default=ROOT / "experiments" / "records")
    args = parser.parse_args()
    record = record_study(args.study, args.results, args.records)
    print(f"{record}: draw its figures with `make figures` and commit it")


if __name__ == "__main__":
    run_cli(main)
