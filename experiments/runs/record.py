"""`python -m experiments.runs.record`: a finished study's small results, in the form to commit.

From these alone the claims, the figures and the MLflow view can be made again.
"""

import argparse
import shutil
from pathlib import Path

from experiments.runs.attempts import read_history
from experiments.runs.drift import RECORDED_DRIFT, has_drift, read_drift, write_drift
from experiments.runs.manifest import RunManifest, read_manifest
from experiments.runs.metrics import RECORDED_METRICS, write_csv
from experiments.study.arms import ARMS
from experiments.study.load import load_study
from experiments.study.schema import ROOT
from experiments.support.cli import RESULTS, STUDY, run_cli
from experiments.support.json_files import REMAKE
from qat_core.drift.names import FILE


def record_study(
    study_file: Path, results: Path, records: Path, *, allow_uncommitted: bool = False
) -> Path:
    """Copies a study's results into `records`; returns the study's folder there.

    Args:
        study_file: the study.
        results: where its runs are.
        records: where its record goes; an older one is replaced.
        allow_uncommitted: also record runs of code that no commit holds.

    Raises:
        ValueError: a run is missing, not finished and evaluated, has other settings, or was made
            by code that no commit holds.
    """
    study = load_study(study_file)
    study_dir, record = results / "studies" / study.study, records / study.study
    sources = [results / run.id for run in study.runs]
    wanted = [source / name for source in sources for name in ("manifest.json", "eval.json")]
    if study.rl.drift_every:
        wanted += [results / r.id / FILE for r in study.runs if ARMS[r.arm].rollout_recipe]
    wanted.append(study_dir / "claims.json")
    missing = [str(path) for path in wanted if not path.is_file()]
    if missing:
        raise ValueError(f"{missing[0]}: missing; run study {study.study} to its end first")
    for run in study.runs:
        manifest = read_manifest(results / run.id, REMAKE)
        if manifest.config != study.training_config(run):
            raise ValueError(
                f"{results / run.id}: trained with other settings than {study_file}; run the "
                "study again"
            )
        if not allow_uncommitted:
            require_commit(manifest, results / run.id)
    shutil.rmtree(record, ignore_errors=True)
    for source in sources:
        _record_run(source, record / source.name)
    shutil.copy(study_dir / "claims.json", record)
    shutil.copy(study_file, record / "study.yaml")
    return record


def require_commit(manifest: RunManifest, run_dir: Path) -> None:
    """ValueError if a reader could not check out the code that made the run."""
    git = manifest.git
    if git is None or git.commit is None or git.dirty:
        state = "changes" if git is not None and git.dirty else "code"
        raise ValueError(
            f"{run_dir}/manifest.json: git: trained by {state} that no commit holds; commit and "
            "run the study again, or pass --allow-uncommitted, and the tables will say so"
        )


def _record_run(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    _, rows = read_history(source)
    write_csv(target / RECORDED_METRICS, rows)
    if has_drift(source):
        write_drift(target / RECORDED_DRIFT, read_drift(source))
    for name in ("manifest.json", "eval.json"):
        shutil.copy(source / name, target)


def main() -> None:
    """Parses the command line and records one study."""
    parser = argparse.ArgumentParser(description=__doc__, parents=[STUDY, RESULTS])
    parser.add_argument("--records", type=Path, default=ROOT / "experiments" / "records")
    parser.add_argument(
        "--allow-uncommitted", action="store_true", help="also record runs of uncommitted code"
    )
    args = parser.parse_args()
    record = record_study(
        args.study, args.results, args.records, allow_uncommitted=args.allow_uncommitted
    )
    print(f"{record}: draw its figures with `make figures` and commit it")


if __name__ == "__main__":
    run_cli(main)
