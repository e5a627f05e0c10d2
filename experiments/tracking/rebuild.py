"""Makes MLflow's view again from the files of a folder of results or records."""

import argparse
from pathlib import Path

from experiments.runs.attempts import list_run_dirs
from experiments.tracking.publish import publish_study, rebuild_run
from experiments.tracking.store import connect, explained_errors


def rebuild(folder: Path) -> None:
    """Makes the MLflow runs of a results or records folder from its files."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; name results or a folder of records")
    run_dirs = list_run_dirs(folder)
    for number, run_dir in enumerate(run_dirs, 1):
        rebuild_run(run_dir)
        print(f"{run_dir}: read, {number} of {len(run_dirs)}", flush=True)
    judged = [*(folder / "studies").glob("*/claims.json"), *folder.glob("claims.json")]
    for claims in judged:
        publish_study(claims.parent, folder)


def main(args: argparse.Namespace) -> None:
    """Rebuilds the folder that the command line names."""
    with explained_errors():
        connect()  # a store that is none is named here, and not as the failure of a run
        rebuild(args.folder)
