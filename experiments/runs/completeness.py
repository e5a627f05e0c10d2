"""Which cells of a grid are complete: all their runs are trained to the last step."""

from pathlib import Path

from experiments.runs.manifest import MANIFEST, read_manifest
from experiments.study.schema import Run, Study
from experiments.support.json_files import REMAKE


def is_trained(run_dir: Path) -> bool:
    """Whether a run's folder, or its record, holds a finished run.

    Raises:
        ValueError: its manifest is damaged.
    """
    return (run_dir / MANIFEST).is_file() and read_manifest(run_dir, REMAKE).status == "finished"


def complete_cells(study: Study, results: Path) -> dict[str | None, tuple[Run, ...]]:
    """The cells of a grid that have all their runs, with these, in the study's order.

    A study without cells is a single one, whose name is None.
    """
    runs_of: dict[str | None, list[Run]] = {}
    for run in study.runs:
        runs_of.setdefault(run.cell, []).append(run)
    return {
        cell: tuple(runs)
        for cell, runs in runs_of.items()
        if all(is_trained(results / run.id) for run in runs)
    }
