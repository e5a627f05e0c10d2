"""Fills the README's marked blocks from committed records: `python -m analysis.readme [--check]`.

A block lies between two comment lines, and everything between them is replaced:

    <!-- begin:claims STUDY -->            the claims table of that study's record
    <!-- end:claims -->
    <!-- begin:figures STUDY NAME ... -->  the named figures of that record
    <!-- end:figures -->
    <!-- begin:benchmarks MACHINE -->      the tables of the vLLM benchmarks on that machine
    <!-- end:benchmarks -->
    <!-- begin:verl MACHINE -->            the table of verl runs there
    <!-- end:verl -->
    <!-- begin:codec MACHINE -->           the tables of the codec
    <!-- end:codec -->

Without STUDY it is `default`, without NAME all figures are shown, without MACHINE it is `h200`. The
record is experiments/records/STUDY with claims.json and figures/NAME.png, for tables
experiments/records/benchmarks.
"""

import argparse
import re
from pathlib import Path

from analysis.claims_table import read_table
from analysis.figures import FIGURES
from analysis.tables import SECTIONS, benchmark_text
from experiments.study.schema import ROOT
from experiments.support.cli import run_cli

RECORDS = Path("experiments", "records")
KINDS = ("claims", "figures", *SECTIONS)
BLOCK = re.compile(
    rf"(?P<begin><!-- begin:(?P<kind>{'|'.join(KINDS)})(?P<words>[^\n]*?) -->\n)"
    r"(?P<content>.*?)"
    r"(?P<end><!-- end:(?P=kind) -->)",
    re.DOTALL,
)
MARKER = re.compile(r"<!-- (?:begin|end):")


def fill_blocks(text: str, root: Path) -> str:
    """The text with every block filled from the records under `root`; filling twice is no change.

    Raises:
        ValueError: a marker is unpaired or misspelt, or a record lacks what a block shows.
    """
    if len(MARKER.findall(text)) != 2 * len(BLOCK.findall(text)):
        raise ValueError(
            "README: a begin or end marker is misspelt or has no partner; write "
            f"<!-- begin:claims STUDY --> and <!-- end:claims -->; kinds: {', '.join(KINDS)}"
        )
    return BLOCK.sub(lambda block: _filled(block, root), text)


def _filled(block: re.Match[str], root: Path) -> str:
    words = block["words"].split()
    study, *names = words or ["default"]
    record = RECORDS / study
    if block["kind"] in SECTIONS:
        machine = words[0] if words else "h200"
        content = benchmark_text(block["kind"], root / RECORDS / "benchmarks", machine)
    elif block["kind"] == "claims":
        content = read_table(root / record / "claims.json").to_markdown()
    else:
        content = "".join(_figure(root, record, name) for name in names or FIGURES)
    return f"{block['begin']}\n{content}\n{block['end']}"


def _figure(root: Path, record: Path, name: str) -> str:
    if name not in FIGURES:
        raise ValueError(f"README: no figure {name!r}; there are {', '.join(FIGURES)}")
    path = record / "figures" / f"{name}.png"
    if not (root / path).is_file():
        raise ValueError(f"{path}: missing; draw it with make figures")
    return f"![{FIGURES[name].caption}]({path.as_posix()})\n"


def main() -> None:
    """Rewrites README.md, or with --check only says whether it is up to date."""
    parser = argparse.ArgumentParser(description="Fill the README's blocks from the records.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of date")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    current = readme.read_text()
    filled = fill_blocks(current, ROOT)
    if arguments.check and filled != current:
        raise ValueError("README.md: out of date with experiments/records; run make figures")
    if filled != current:
        readme.write_text(filled)


if __name__ == "__main__":
    run_cli(main)
