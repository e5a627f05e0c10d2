"""What the report of a study says, read from its results or from its record."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from analysis.arms import summarize_arms
from analysis.claims import claims_page
from analysis.claims_table import read_table
from analysis.drift.order import order_table
from analysis.figure_files import CAPTIONS, KINDS
from analysis.figures import drawings
from analysis.style import figure_bytes
from experiments.rl.metric_names import DRIFT_FILE
from experiments.runs.evaluation import EVALUATIONS
from experiments.runs.manifest import MANIFEST, RunManifest
from experiments.runs.metrics import METRICS
from experiments.runs.provenance import digest_file
from experiments.runs.record import FILES as RECORD_FILES
from experiments.runs.record import has_file, open_record
from experiments.runs.settings import read_run
from experiments.runs.summary import ArmSummary
from experiments.study.load import load_study
from experiments.study.schema import ROOT, Study

HINT = "run the study to its end"
HINT_OF_RECORD = "record the study again"
FILES = (MANIFEST, METRICS, EVALUATIONS, DRIFT_FILE, *RECORD_FILES.values())


class ShownFigure(NamedTuple):
    """A figure."""

    name: str
    caption: str
    svg: bytes


class ShownFile(NamedTuple):
    """A file that the page was made from, of a run's or a record's folder."""

    folder: str
    name: str
    num_bytes: int
    sha256: str


class Content(NamedTuple):
    """All that the page of a study shows; runs by id, claims, protocol and drift as Markdown."""

    study: Study
    study_yaml: str
    manifests: Mapping[str, RunManifest]
    arms: tuple[ArmSummary, ...]
    missing: tuple[str, ...]
    claims: str
    figures: tuple[ShownFigure, ...]
    files: tuple[ShownFile, ...]
    protocol: str
    command: str
    drift: Mapping[str, str]


def read_content(study_file: Path, results: Path) -> Content:
    """Reads a finished study from a results folder, or from the folder of its record."""
    study = load_study(study_file)
    record = open_record(results)
    judged = results if record else results / "studies" / study.study
    trained, drawn = (HINT_OF_RECORD, "make it with make figures") if record else (HINT, HINT)
    there = [run for run in study.runs if has_file(results / run.id, MANIFEST)]
    if not there:
        raise ValueError(f"{results}: no run of study {study.study}; {trained}")
    shown = drawings(study, results)
    return Content(
        study=study,
        study_yaml=study_file.read_text(),
        manifests={run.id: read_run(study, run, results, trained) for run in there},
        arms=summarize_arms(study, results),
        missing=tuple(run.id for run in study.runs if run not in there),
        claims=claims_page(study, results, read_table(judged / "claims.json", drawn)),
        figures=tuple(
            ShownFigure(name, CAPTIONS[name], figure_bytes(draw, "svg"))
            for name, draw in shown.figures.items()
        ),
        files=tuple(_files([results] if record else [results / run.id for run in there])),
        protocol=(ROOT / KINDS[study.judged_by].protocol).read_text(),
        command=f"python -m analysis.figures --study {_shown(study_file)} "
        f"--results {_shown(results)} --out figures",
        drift={model: order_table(runs()) for model, runs in shown.drift.items()},
    )


def _files(folders: Iterable[Path]) -> Iterator[ShownFile]:
    for path in (folder / name for folder in folders for name in FILES):
        if path.is_file():
            yield ShownFile(path.parent.name, path.name, path.stat().st_size, digest_file(path))


def _shown(path: Path) -> str:
    """From the repository's root, where it lies there."""
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name)
