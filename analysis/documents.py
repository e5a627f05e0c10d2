"""Fills blocks of documents from records: `python -m analysis.documents [--check]`.

A block lies between two comment lines, and everything between them is replaced:

    <!-- begin:claims STUDY -->            the claims table of that study's record, and its origin
    <!-- end:claims -->
    <!-- begin:figures STUDY NAME ... -->  its figures of those names; without names all but drift;
                                           `benchmarks` has figures of its own
    <!-- begin:replications STUDY -->      its claims again, with seeds that are not in the record
    <!-- begin:outcomes STUDY -->          of a grid, what became of each setting's runs
    <!-- begin:studies -->                 a summary row for each model of every recorded study
    <!-- begin:collapses -->               likewise of the studies of collapses
    <!-- begin:times -->                   how long the runs of every recorded study took
    <!-- begin:metrics -->                 the catalogue of metrics
    <!-- begin:KIND MACHINE -->            benchmark tables: a key of analysis.tables.SECTIONS, and
                                           how the records' names end, or the size of a study

The records are experiments/records/STUDY (claims.json, figures/NAME.png) and
experiments/records/benchmarks.
"""

import argparse
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from analysis.claims_table import read_table
from analysis.collapse.figures import FIGURES as GRID_FIGURES
from analysis.collapse.outcome_table import outcome_table
from analysis.figure_files import NAMES
from analysis.figures import FIGURES, qwen3
from analysis.metrics import catalogue_text
from analysis.record import recorded_manifests
from analysis.replication import replications_text
from analysis.tables import SECTIONS, benchmark_text
from analysis.tables.collapses import collapses_text
from analysis.tables.summary import summary_text
from analysis.tables.times import made_by, times_text
from experiments.study.load import load_study
from experiments.study.schema import ROOT, Study
from experiments.support.cli import run_cli

RECORDS = Path("experiments", "records")
WITHOUT_WORDS: Mapping[str, Callable[[Path], str]] = {
    "studies": summary_text,
    "collapses": collapses_text,
    "times": times_text,
    "metrics": lambda _: catalogue_text(),
}
KINDS = ("claims", "figures", "outcomes", "replications", *WITHOUT_WORDS, *SECTIONS)
CAPTIONS = {name: it.caption for name, it in FIGURES.items()} | {
    name: it.caption for name, it in GRID_FIGURES.items()
}
CAPTIONS |= {name: it.caption for name, it in qwen3.DRAWINGS.items()}
BLOCK = re.compile(
    rf"(?P<begin><!-- begin:(?P<kind>{'|'.join(KINDS)})(?P<words>[^\n]*?) -->\n)"
    r"(?P<content>.*?)"
    r"(?P<end><!-- end:(?P=kind) -->)",
    re.DOTALL,
)
MARKER = re.compile(r"<!-- (?:begin|end):")
DOCUMENTS = (
    "README.md",
    "REPRODUCING.md",
    "docs/results.md",
    "docs/performance.md",
    "docs/statistics.md",
    "docs/metrics.md",
    "docs/routing_replay.md",
    "experiments/records/benchmarks/README.md",
)


def documents(root: Path) -> Iterator[Path]:
    """All documents with blocks of this kind."""
    for pattern in DOCUMENTS:
        yield from sorted(root.glob(pattern))


def fill_blocks(text: str, root: Path, folder: Path) -> str:
    """The text with every block filled from the records under `root`; filling twice is no change.

    Args:
        folder: where the document lies, from which its figures are linked.

    Raises:
        ValueError: a marker is unpaired or misspelt, or a record lacks what a block shows.
    """
    if len(MARKER.findall(text)) != 2 * len(BLOCK.findall(text)):
        raise ValueError(
            "a begin or end marker is misspelt or has no partner; write "
            f"<!-- begin:claims STUDY --> and <!-- end:claims -->; kinds: {', '.join(KINDS)}"
        )
    return BLOCK.sub(lambda block: _filled(block, root, folder), text)


def _filled(block: re.Match[str], root: Path, folder: Path) -> str:
    kind, words = block["kind"], block["words"].split()
    if kind in WITHOUT_WORDS:
        content = WITHOUT_WORDS[kind](root / RECORDS)
    elif not words:
        raise ValueError(f"<!-- begin:{kind} -->: name a study, a machine or a size behind {kind}")
    elif kind == "claims":
        record = root / RECORDS / words[0]
        claims = read_table(record / "claims.json").to_markdown()
        made = f"{_origin(record)}{_training(load_study(record / 'study.yaml'))}"
        content = f"{claims}\n{made}\n"
    elif kind == "replications":
        content = replications_text(root / RECORDS / words[0])
    elif kind == "outcomes":
        record = root / RECORDS / words[0]
        content = outcome_table(load_study(record / "study.yaml"), record) + "\n"
    elif kind == "figures":
        names = words[1:] or NAMES
        content = "".join(_figure(root, folder, words[0], name) for name in names)
    else:
        content = benchmark_text(kind, root / RECORDS / "benchmarks", words[0])
    return f"{block['begin']}\n{content}\n{block['end']}"


def _origin(record: Path) -> str:
    """Commits and machines of a record's runs, and how many there are of each."""
    origins = Counter(made_by(it) for it in recorded_manifests(record))
    return f"Recorded: {'; '.join(f'{n} runs at {made_by}' for made_by, n in origins.items())}."


def _training(study: Study) -> str:
    """What all arms share and a claim does not say; cells have settings of their own."""
    if study.cells:
        return ""
    rl = study.rl
    return f" In all arms: advantages `{rl.advantage}`, correction `{rl.correction}`."


def _figure(root: Path, folder: Path, study: str, name: str) -> str:
    if name not in CAPTIONS:
        raise ValueError(f"no figure {name!r}; there are {', '.join(CAPTIONS)}")
    path = root / RECORDS / study / "figures" / f"{name}.png"
    if not path.is_file():
        raise ValueError(f"{path.relative_to(root)}: missing; draw it with make figures")
    return f"![{study}: {CAPTIONS[name]}]({Path(os.path.relpath(path, folder)).as_posix()})\n"


def fill_document(path: Path, only_check: bool = False) -> None:
    """Rewrites a document of this repository.

    Raises:
        ValueError: it cannot be filled, or, where nothing is to be changed, is out of date.
    """
    current, name = path.read_text(), path.relative_to(ROOT)
    try:
        filled = fill_blocks(current, ROOT, path.parent)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if only_check and filled != current:
        raise ValueError(f"{name}: out of date with experiments/records; run make figures")
    if filled != current:
        path.write_text(filled)


def main() -> None:
    """Rewrites the documents, or with --check only says whether they are up to date."""
    parser = argparse.ArgumentParser(description="Fill the documents' blocks from the records.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of date")
    args = parser.parse_args()
    for path in documents(ROOT):
        fill_document(path, args.check)


if __name__ == "__main__":
    run_cli(main)
