"""One page a study: `python -m analysis.report --study FILE --results DIR --out FILE`.

DIR is a results folder or the folder of the study's record; its claims and figures must be there.
Snakemake's own `--report` needs its metadata of the run, which no record has; its page is a program
of 3.5 MB that shows one result at a time, and its bytes do not repeat.
"""

import argparse
from pathlib import Path

from analysis.report.content import read_content
from analysis.report.page import render
from experiments.support.cli import STUDY, run_cli


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], parents=[STUDY])
    parser.add_argument("--results", type=Path, required=True, help="results or records folder")
    parser.add_argument("--out", type=Path, required=True, help="HTML file")
    arguments = parser.parse_args()
    page = render(read_content(arguments.study, arguments.results))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(page)
    print(f"{arguments.out}: {len(page.encode()) / 1e6:.1f} MB, opens in any browser")


if __name__ == "__main__":
    run_cli(main)
