"""`python -m analysis.record`: a finished study's small results and claims, in the form to commit.

From the results alone the claims, the figures and the MLflow view can be made again. The claims are
judged here, not copied: so they are of these runs.
"""

import argparse
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.claims import judge
from analysis.claims_table import read_table
from analysis.replication_file import REPLICATIONS, replication_of
from experiments.rl.metric_names import DRIFT_FILE
from experiments.runs.attempts import list_run_dirs
from experiments.runs.drift import read_drift
from experiments.runs.evaluation import EVALUATIONS, read_evaluations
from experiments.runs.manifest import MANIFEST, RunManifest, read_manifest, read_manifest_json
from experiments.runs.metrics import GRID_METRICS, read_rows
from experiments.runs.record import RecordedRun, file_of, has_file, write_record
from experiments.runs.settings import complete_cells, read_evaluations_of, read_run
from experiments.study.arms import ARMS
from experiments.study.load import load_study
from experiments.study.schema import ROOT, Run, Study
from experiments.support.cli import RESULTS, STUDY, run_cli
from experiments.support.json_files import REMAKE, write_json


def record_study(
    study_file: Path, results: Path, records: Path, *, allow_uncommitted: bool = False
) -> Path:
    """Judges a study and copies its results into `records`; returns the study's folder there.

    Of a study of collapses the complete cells are copied; its claims name the others. Where they
    only add to the record so far its cells are kept: a grid can be run in parts, on machines whose
    results are gone with them. Where they replace a run, the record is replaced as a whole. Of a
    cell that is run in parts, put the runs' folders of all parts into `results`.

    An older record is replaced as a whole or not at all. Its replications stay and, where it is of
    the same settings, so do its own outcomes as one more of them: recording again hides nothing.

    Raises:
        ValueError: a run is missing, not finished and evaluated, has other settings, or was made
            by code that no commit holds; no cell is complete, or one, or one and a kept one, mixes
            base checkpoints; the older record is of other models, or has replications of other
            settings.
    """
    study = load_study(study_file)
    record = records / study.study
    # no study's name begins with a dot
    partial, former = (record.with_name(f".{record.name}.{it}") for it in ("partial", "former"))
    _clean_up(record, partial, former)  # after a kill
    runs = _runs_to_record(study, results)
    _require_whole(study, runs, results)
    _require_same_models(study, record)
    _require_replications_of(study, record)
    kept = _runs_to_keep(study, record, runs, results)
    if not allow_uncommitted:
        for run_dir in (*(results / run.id for run in runs), *(record / run.id for run in kept)):
            require_commit(read_manifest(run_dir, REMAKE), run_dir)
    try:
        made = {run.id: recorded_run(results / run.id, of_grid=bool(study.cells)) for run in runs}
        former_runs = {run.id: recorded_run(record / run.id) for run in kept}
        write_record(partial, made | former_runs)
        judge(study, partial).write(partial)
        shutil.copy(study_file, partial / "study.yaml")
        _keep_outcomes(study, record, partial)
        _say_what_goes(record, partial)
        if record.exists():
            record.rename(former)
        partial.rename(record)
    finally:
        _clean_up(record, partial, former)
    return record


def _clean_up(record: Path, partial: Path, former: Path) -> None:
    """Leaves the record alone, the former one where the new one did not take its place."""
    if former.exists() and not record.exists():
        former.rename(record)
    for folder in (partial, former):
        shutil.rmtree(folder, ignore_errors=True)


def _keep_outcomes(study: Study, record: Path, partial: Path) -> None:
    """Takes over replications, and the claims of other runs that made the record so far."""
    if (record / REPLICATIONS).is_dir():
        shutil.copytree(record / REPLICATIONS, partial / REPLICATIONS)
    if not (record / "study.yaml").is_file():
        return
    older = load_study(record / "study.yaml")
    if _but_seeds(older) != _but_seeds(study):
        return
    manifests = recorded_manifests(record)
    started_at = {it.started_at for it in manifests}
    if started_at <= {it.started_at for it in recorded_manifests(partial)}:
        return  # the same runs, perhaps more of them
    claims, claimed_now = (read_table(folder / "claims.json") for folder in (record, partial))
    if claims.keys != claimed_now.keys:
        print(f"{record}: the record before makes other claims: only the history keeps them")
        return
    (partial / REPLICATIONS).mkdir(exist_ok=True)
    # to the second: a study can be recorded more than once a day
    moment = min(started_at)[: len("2026-11-25T10:00:00")].replace(":", "-")
    path = partial / REPLICATIONS / f"recorded-{moment}.json"
    write_json(path, replication_of(older, claims, manifests).model_dump(mode="json"))


def recorded_manifests(record: Path) -> list[RunManifest]:
    """Those of a record's runs, by run id."""
    return [read_manifest(run_dir, REMAKE) for run_dir in list_run_dirs(record)]


def _require_same_models(study: Study, record: Path) -> None:
    """ValueError where the record of the study's name is of other models: another study has it."""
    recorded = record / "study.yaml"
    if recorded.is_file() and not load_study(recorded).models.keys() & study.models.keys():
        raise ValueError(
            f"{record}: the record of another study, with other models; give the study another name"
        )


def _require_replications_of(study: Study, record: Path) -> None:
    kept = record / REPLICATIONS
    if kept.is_dir() and _but_seeds(load_study(record / "study.yaml")) != _but_seeds(study):
        raise ValueError(
            f"{kept}: of other settings than study {study.study} has now; remove it, or give the "
            "study another name"
        )


def _but_seeds(study: Study) -> dict[str, Any]:
    return study.model_dump(mode="json", exclude={"seeds"})


def _runs_to_record(study: Study, results: Path) -> Sequence[Run]:
    """All runs of a study, of one about collapses those of its complete cells."""
    if study.judged_by == "parity":
        return study.runs
    cells = complete_cells(study, results)
    if not cells:
        raise ValueError(
            f"{results}: {'no cell' if study.cells else 'not all'} of study {study.study} is "
            "complete; run it first"
        )
    for cell, runs in cells.items():
        require_one_base_a_seed(cell, [read_manifest(results / run.id, REMAKE) for run in runs])
    return [run for runs in cells.values() for run in runs]


def _runs_to_keep(study: Study, record: Path, runs: Sequence[Run], results: Path) -> list[Run]:
    """Those of the record's complete cells that are not among `runs`, if these only add to it."""
    if study.judged_by == "parity" or any(_replaces(results, record, run) for run in runs):
        return []
    try:
        cells = complete_cells(study, record)
    except ValueError as error:
        print(f"{record}: none of its cells is kept: {error}")
        return []
    made = {run.cell for run in runs}
    kept = [run for cell, its in cells.items() if cell not in made for run in its]
    if kept:  # claims compare runs of a seed across cells
        folders = [*(results / run.id for run in runs), *(record / run.id for run in kept)]
        require_one_base_a_seed(None, [read_manifest(folder, REMAKE) for folder in folders])
    return kept


def _replaces(results: Path, record: Path, run: Run) -> bool:
    """Whether a record has a run of this name that is another one."""
    if not has_file(record / run.id, MANIFEST):
        return False
    made, recorded = (read_manifest(folder / run.id, REMAKE) for folder in (results, record))
    return made.started_at != recorded.started_at


def _say_what_goes(record: Path, partial: Path) -> None:
    """Prints which cells' runs the record so far has and the new one has not."""
    recorded, new = (recorded_manifests(folder) for folder in (record, partial))
    gone = [it for it in recorded if it.run not in {other.run for other in new}]
    if gone:
        cells = ", ".join(sorted({it.cell or "the study" for it in gone}))
        print(
            f"{record}: {len(gone)} runs of {cells} are no longer in it: only the history has them"
        )


def require_one_base_a_seed(cell: str | None, manifests: Sequence[RunManifest]) -> None:
    """ValueError if two arms of a cell start a seed from different base checkpoints."""
    first: dict[tuple[str, int], RunManifest] = {}
    for it in manifests:
        same = first.setdefault((it.model, it.seed), it)
        if it.digests["base"] != same.digests["base"]:
            raise ValueError(
                f"{f'cell {cell}: ' if cell else ''}{same.run} and {it.run} start from different "
                "base checkpoints; delete one of them and train it again"
            )


def require_commit(manifest: RunManifest, run_dir: Path) -> None:
    """ValueError if a reader could not check out the code that made the run."""
    git = manifest.git
    if git is None or git.commit is None or git.dirty:
        state = "changes" if git is not None and git.dirty else "code"
        raise ValueError(
            f"{file_of(run_dir, MANIFEST)}: git: trained by {state} that no commit holds; commit "
            "and run the study again, or pass --allow-uncommitted, and the tables will say so"
        )


def _require_whole(study: Study, runs: Sequence[Run], results: Path) -> None:
    """ValueError if a run lacks what its record needs.

    Claims about collapses need no offline accuracies, and they say how many runs have none.
    """
    for run in runs:
        is_watched = study.rl.drift_every and ARMS[run.arm].rollout_recipe
        evaluations = [EVALUATIONS] if study.judged_by == "parity" else []
        for file in (MANIFEST, *evaluations, *([DRIFT_FILE] if is_watched else [])):
            if not has_file(results / run.id, file):
                where = file_of(results / run.id, file)
                raise ValueError(f"{where}: missing; run study {study.study} to its end first")
        read_run(study, run, results, REMAKE)
        if has_file(results / run.id, EVALUATIONS):
            read_evaluations_of(study, results / run.id, REMAKE)


def recorded_run(run_dir: Path, *, of_grid: bool = False) -> RecordedRun:
    """What the record holds of a run; of a grid not all its metrics."""
    manifest, rows = read_manifest_json(run_dir, REMAKE), read_rows(run_dir, REMAKE)
    if of_grid:  # many runs: what claims, figures and MLflow's summary read
        rows = [{key: row[key] for key in row if key.startswith(GRID_METRICS)} for row in rows]
    evaluations = read_evaluations(run_dir, REMAKE) if has_file(run_dir, EVALUATIONS) else []
    return RecordedRun(
        manifest=manifest | {"command": portable(manifest["command"])},
        metrics=pd.DataFrame(rows),
        evaluations=[it.model_dump(mode="json") for it in evaluations],
        drift=read_drift(run_dir) if has_file(run_dir, DRIFT_FILE) else None,
    )


def portable(command: str) -> str:
    """A command whose absolute paths are their last part: a record names no folder of a machine."""
    words = shlex.split(command)
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in words)


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
