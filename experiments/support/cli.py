"""What the command-line programs share: arguments, and one line for an error of the user."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from errno import EDQUOT, EFBIG, ENOSPC
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

USER_MISTAKE, INTERRUPTED = 2, 130  # exit codes; the second is a shell's
NO_SPACE = (ENOSPC, EDQUOT, EFBIG)
MISTAKES = (
    ValueError,
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def argument(name: str, **settings: Any) -> argparse.ArgumentParser:
    """A parser of one argument, for `parents` of a program's."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(name, **settings)
    return parser


STUDY = argument("--study", type=Path, required=True, help="study file")
RUN = argument("--run", required=True, help="run id")
RUNS = argument("--run", nargs="+", required=True, help="run ids")
RESULTS = argument("--results", type=Path, default=Path("results"), help="results folder")


class ProgramError(Exception):
    """A program that this one started has failed: no mistake of the user's, another try may do."""


def run_cli(main: Callable[[], None]) -> None:
    """Calls `main`; an error that names its cause becomes one line on stderr.

    The exit code is 2 for a mistake of the user's, see `is_mistake`. Other errors of the operating
    system, such as a network disk's, and a `ProgramError` have 1: another try may do. What was
    stopped by hand has 130.
    """
    try:
        main()
    except KeyboardInterrupt as stop:
        print(f"stopped: {str(stop) or 'Ctrl-C'}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except (ValueError, OSError, ProgramError) as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        sys.exit(USER_MISTAKE if is_mistake(error) else 1)


def run_command(
    package: str, what: str, commands: Mapping[str, Sequence[argparse.ArgumentParser]]
) -> None:
    """Parses `python -m PACKAGE COMMAND ...`, and calls `main` of the package's module COMMAND.

    That is imported then, so that neither help nor a mistake waits for torch.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=what)
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, arguments in commands.items():
        said = files(package).joinpath(f"{name}.py").read_text().partition("\n")[0].strip('"')
        parsers.add_parser(name, help=said, description=said, parents=arguments)
    given = parser.parse_args()
    import_module(f"{package}.{given.command}").main(given)


def is_mistake(error: BaseException) -> bool:
    """Whether every try ends so until the user acts: wrong input, no file, permission or space."""
    return isinstance(error, MISTAKES) or getattr(error, "errno", None) in NO_SPACE


def describe_error(error: Exception) -> str:
    """What the user is shown: the message, and of the operating system's the file and a hint."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    hint = "; free disk space" if error.errno in NO_SPACE else ""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}{hint}"
