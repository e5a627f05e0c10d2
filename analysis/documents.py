"""Writes pages from templates and records: `python -m analysis.documents [--check]`.

analysis/pages has a jinja2 template for each page that shows what was measured, under the page's
own path: README.md.j2, docs/results.md.j2. Each recorded study has a page too, by record.md.j2.
A template fills in

    {{ note("STUDY") }}               what notes.yaml says of that study
    {{ claims("STUDY") }}             the claims table of that study's record, and its origin
    {{ figures("STUDY", "NAME") }}    its figures of those names, without names all of them;
                                      `benchmarks` has figures of its own
    {{ replications("STUDY") }}       its claims again, of runs that are not in the record, if any
    {{ outcomes("STUDY") }}           of a grid, what became of each setting's runs
    {{ studies() }}                   a summary row for each model of every recorded study
    {{ collapses() }}                 likewise of the studies of collapses
    {{ front() }}                     the few rows of README
    {{ times() }}                     how long the runs of every recorded study took
    {{ metrics() }}                   the catalogue of metrics
    {{ ladder_plan() }}               the rungs of the ladder of sizes, from their files
    {{ KIND("MACHINE") }}             benchmark tables: a key of analysis.tables.SECTIONS, and how
                                      the records' names end, or the size of a study

and into its sentences

    {{ claim("STUDY", "C9").estimate }}         any field of `Claim`; a third word names the model
    {{ claim("STUDY", "C9")|shown }}            estimate and interval; `|opposite|shown` turns signs
    {{ cell(goals("h200"), "Marlin", "qwen3-8b", "prefill")|number }}
                                                of a table, the column of the one row with these
                                                words or {"HEADING": "CELL"}; of its numbers the
                                                first, or `number(2)`
    {{ cells(verl("h200"), "Step, s", "bf16")|span }}  likewise of all such rows, least to greatest
"""

import argparse
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from analysis.claims import outcomes_text
from analysis.claims_table import Claim, read_table
from analysis.figure_files import CAPTIONS, recorded_names
from analysis.ladder.plan import plan_text
from analysis.load import recorded_study
from analysis.markdown import read_rows
from analysis.metrics import catalogue_text
from analysis.record import recorded_manifests
from analysis.replication import replications_text
from analysis.tables import SECTIONS, benchmark_text
from analysis.tables.collapses import collapses_text
from analysis.tables.front import front_text
from analysis.tables.summary import summary_text
from analysis.tables.times import made_by, times_text
from experiments.study.schema import ROOT
from experiments.support.cli import run_cli

RECORDS = Path("experiments", "records")
PAGES = Path("analysis", "pages")
NOTES = ROOT / PAGES / "notes.yaml"
OF_STUDY = "record.md.j2"
# of the folder of a record, or of all
BLOCKS: Mapping[str, Callable[[Path], str]] = {
    "note": lambda record: yaml.safe_load(NOTES.read_text()).get(record.name, ""),
    "claims": lambda record: claims_text(record),
    "replications": replications_text,
    "outcomes": lambda record: outcomes_text(recorded_study(record), record),
    "studies": summary_text,
    "collapses": collapses_text,
    "front": front_text,
    "times": times_text,
    "metrics": lambda _: catalogue_text(),
    "ladder_plan": lambda _: plan_text(),
}
NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")


class Page(NamedTuple):
    """A written page: its path, its template, and the study that it is about, if it is of one."""

    path: Path
    template: str
    study: str = ""

    def text(self, root: Path = ROOT) -> str:
        """Its text; the first line says where it comes from."""
        source = PAGES / self.template
        try:
            body = written((root / source).read_text(), root, self.path.parent, study=self.study)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
        return f"<!-- Written by make figures from {source.as_posix()}: change that. -->\n{body}"

    def write(self, only_check: bool = False) -> None:
        """Writes it where it is out of date; ValueError if it is not to be changed."""
        text = self.text()
        if not self.path.is_file() or self.path.read_text() != text:
            if only_check:
                raise ValueError(f"{self.path.relative_to(ROOT)}: out of date; run make figures")
            self.path.write_text(text)


def page_of(record: Path) -> Page:
    """The page of a recorded study."""
    return Page(record / "README.md", OF_STUDY, record.name)


def pages_of_all() -> list[Page]:
    """The pages about all records."""
    templates = sorted((ROOT / PAGES).rglob("*.md.j2"))
    names = [it.relative_to(ROOT / PAGES).as_posix() for it in templates]
    return [Page(ROOT / it.removesuffix(".j2"), it) for it in names if it != OF_STUDY]


def pages() -> list[Page]:
    """Every written page."""
    studies = sorted((ROOT / RECORDS).glob("*/study.yaml"))
    return [*pages_of_all(), *(page_of(it.parent) for it in studies)]


def written(text: str, root: Path, folder: Path, **about: str) -> str:
    """A template's text filled in from the records under `root`, for a page in `folder`.

    Raises:
        ValueError: the template asks for what there is not, or a record lacks it.
    """
    environment = Environment(
        loader=FileSystemLoader(root / PAGES),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= _functions(root, folder) | about
    environment.filters |= {"number": number, "shown": shown, "opposite": opposite, "span": span}
    try:
        return environment.from_string(text).render()
    except TemplateError as error:
        raise ValueError(str(error)) from None


def _functions(root: Path, folder: Path) -> dict[str, Any]:
    records = root / RECORDS
    return {name: partial(_block, name, records) for name in (*BLOCKS, *SECTIONS)} | {
        "figures": lambda study, *names: "\n".join(
            _figure(root, folder, study, name)
            for name in names or recorded_names(recorded_study(records / study))
        ),
        "claim": lambda study, name, model=None: one_claim(records / study, name, model),
        "cell": cell,
        "cells": cells,
    }


@cache  # pages share tables of thousands of runs
def _block(name: str, records: Path, *words: str) -> str:
    if name in SECTIONS:
        return benchmark_text(name, records / "benchmarks", *words).strip("\n")
    return BLOCKS[name](records.joinpath(*words)).strip("\n")


def claims_text(record: Path) -> str:
    """The claims table of a record, commits and machines of its runs, and what all arms share."""
    manifests = recorded_manifests(record)
    origins = Counter(map(made_by, manifests))
    made = "; ".join(f"{n} runs at {made_by}" for made_by, n in origins.items())
    study = recorded_study(record)
    # cells have settings of their own
    shared = (
        ""
        if study.cells
        else f" In all arms: advantages `{study.rl.advantage}`, correction `{study.rl.correction}`."
    )
    unbound = sum(it.judging_sha256 is None for it in manifests)
    older = f" {unbound} began before manifests knew how a run is judged." if unbound else ""
    return f"{read_table(record / 'claims.json').to_markdown()}\nRecorded: {made}.{shared}{older}"


def one_claim(record: Path, name: str, model: str | None) -> Claim:
    """The claim of that name, about that model where there are several."""
    all_claims = read_table(record / "claims.json").claims
    found = [it for it in all_claims if it.name == name and model in (None, it.model)]
    if len(found) != 1:
        there = ", ".join(f"{it.name} of {it.model}" for it in all_claims)
        raise ValueError(f"{record.name}: {len(found)} claims {name!r}; there are {there}")
    return found[0]


def cells(table: str, column: str, *wanted: str | Mapping[str, str]) -> list[str]:
    """That column of a Markdown text's rows that have all of these words, or cells by heading."""

    def has(row: Mapping[str, str], it: str | Mapping[str, str]) -> bool:
        return it in row.values() if isinstance(it, str) else row.items() >= it.items()

    rows = [row for row in read_rows(table) if column in row]
    found = [row[column] for row in rows if all(has(row, it) for it in wanted)]
    if not found:
        raise ValueError(f"no row with {', '.join(map(str, wanted))} and a column {column!r}")
    return found


def cell(table: str, column: str, *wanted: str | Mapping[str, str]) -> str:
    """The same of a single row."""
    found = cells(table, column, *wanted)
    if len(found) > 1:
        words = ", ".join(map(str, wanted))
        raise ValueError(f"{len(found)} rows with {words} and a column {column!r}")
    return found[0]


def number(text: str, index: int = 1) -> str:
    """The index-th number of a text, as it is written there, counted from 1."""
    found = NUMBER.findall(text)
    if len(found) < index:
        raise ValueError(f"{text!r} has no number {index}")
    return str(found[index - 1])


def span(texts: list[str], index: int = 1) -> str:
    """The least and the greatest of the texts' index-th numbers."""
    numbers = sorted((number(it, index) for it in texts), key=lambda it: float(it.replace(",", "")))
    ends = dict.fromkeys((numbers[0], numbers[-1]))
    return " to ".join(ends)


def shown(claim: Claim) -> str:
    """Estimate and interval."""
    return f"{claim.shown_estimate} ({claim.interval})"


def opposite(claim: Claim) -> Claim:
    """By how much the second of two is above the first, of a claim on the first less the second."""
    ends = {"estimate": claim.estimate, "low": claim.high, "high": claim.low}
    return claim.model_copy(
        update={key: None if end is None else -end for key, end in ends.items()}
    )


def _figure(root: Path, folder: Path, study: str, name: str) -> str:
    if name not in CAPTIONS:
        raise ValueError(f"no figure {name!r}; there are {', '.join(CAPTIONS)}")
    path = root / RECORDS / study / "figures" / f"{name}.png"
    if not path.is_file():
        raise ValueError(f"{path.relative_to(root)}: missing; draw it with make figures")
    return f"![{study}: {CAPTIONS[name]}]({Path(os.path.relpath(path, folder)).as_posix()})"


def main() -> None:
    """Writes the pages, or with --check only says whether they are up to date."""
    parser = argparse.ArgumentParser(description="Write the pages that show records.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of date")
    only_check = parser.parse_args().check
    for page in pages():
        page.write(only_check)


if __name__ == "__main__":
    run_cli(main)
