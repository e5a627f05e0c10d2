"""Which cells of a grid are complete: all their runs are trained to the last step."""

from pathlib import Path

from experiments.runs.manifest import MANIFEST
from experiments.runs.record import has_file
from experiments.runs.settings import read_run
from experiments.study.schema import Run, Study
from experiments.support.json_files import REMAKE


def is_trained(study: Study, run: Run, results: Path) -> bool:
    """Whether a run of a study has finished, in a results folder or a record."""
    return (
        has_file(results / run.id, MANIFEST)
        and read_run(study, run, results, REMAKE).status == "finished"
    )


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
        if all(is_trained(study, run, results) for run in runs)
    }
