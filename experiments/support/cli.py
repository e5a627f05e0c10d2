"""What the command-line programs share: arguments, and one line for an error of the user."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _argument(name: str, **settings: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(name, **settings)
    return parser


# for `parents` of a program's parser
STUDY = _argument("--study", type=Path, required=True, help="study file")
RUN = _argument("--run", required=True, help="run id")
RESULTS = _argument("--results", type=Path, default=Path("results"), help="results folder")


def run_cli(main: Callable[[], None]) -> None:
    """Calls `main`; a ValueError or a missing file becomes one line on stderr, exit code 2."""
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
