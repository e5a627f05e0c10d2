"""`python -m analysis.reference --out FOLDER`: pages of the public API, made of its docstrings."""

import argparse
from pathlib import Path

import pdoc

import qat_core
from experiments.support.cli import run_cli


def write_reference(out: Path) -> None:
    """Writes HTML pages into a folder."""
    for name in qat_core.__all__:  # pdoc shows what is loaded
        setattr(qat_core, name, getattr(qat_core, name))
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc("qat_core", r"!qat_core\.", output_directory=out)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/reference"), help="folder")
    write_reference(parser.parse_args().out)


if __name__ == "__main__":
    run_cli(main)
