"""`python -m experiments.launch.study FILE [OPTIONS]`: Snakemake on a study, as in `make run`.

Snakemake's own reader names no line of a file that is not YAML, and its own lock takes three lines
to say that the study runs already. What it and the runs print goes to a log; the terminal has one
line of progress. With options, which are Snakemake's, it prints itself.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from experiments.launch.progress import Progress
from experiments.study.load import load_study
from experiments.support.cli import run_cli
from experiments.support.folders import sole_process
from experiments.support.signals import end_with_parent, raise_stop_signals

LOG = "snakemake.log"
SHOWN_LINES = 60  # of the log, after a failure
TERMINAL_S, FILE_S = 1.0, 60.0  # between two looks; a file gets a line each


def main() -> None:
    """Makes the study that the command line names."""
    parser = argparse.ArgumentParser(description="Run a study to its claims and figures.")
    parser.add_argument("study", type=Path, help="study file")
    args, options = parser.parse_known_args()
    make_study(args.study, options)


def make_study(file: Path, options: Sequence[str] = ()) -> Path:
    """Checks the file, then runs Snakemake; nobody else makes the study meanwhile.

    Returns:
        The folder of claims and figures; if Snakemake fails, or has options, it ends the program.
    """
    study = load_study(file)
    folder = Path("results/studies") / study.study
    arguments = ["--configfile", str(file), *options]
    with sole_process(folder / "lock", folder, "makes"):
        if options:
            _snakemake(arguments)
        progress = Progress(study, Path("results"))
        print(progress.beforehand(), flush=True)
        if code := follow(arguments, folder / LOG, progress):
            sys.exit(code)
    return folder


def _snakemake(arguments: Sequence[str]) -> NoReturn:
    from snakemake.cli import main  # takes seconds: not for help and mistakes

    main(arguments)
    sys.exit()


def _snakemake_in_session(arguments: Sequence[str], log: Path) -> NoReturn:
    os.setsid()  # a terminal's Ctrl-C is passed on, once
    end_with_parent()
    with log.open("wb") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    _snakemake(arguments)


def follow(arguments: Sequence[str], log: Path, progress: Progress) -> int:
    """Runs Snakemake to its end and tells how far it is; after a failure, what it said last.

    Returns:
        Its exit code.

    Raises:
        KeyboardInterrupt: it was stopped, and its runs with it.
    """
    # forked: the workflow needs what has been imported here
    program = get_context("fork").Process(target=_snakemake_in_session, args=(arguments, log))
    program.start()
    raise_stop_signals()
    try:
        _tell_until_it_ends(program, progress)
    except KeyboardInterrupt as stop:
        assert program.pid is not None, "started"
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGINT)
        program.join()
        raise KeyboardInterrupt(f"{str(stop) or 'Ctrl-C'}; the same command goes on") from stop
    if program.exitcode:
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join(lines[-SHOWN_LINES:]), file=sys.stderr)
        if len(lines) > SHOWN_LINES:
            print(f"all of it: {log}", file=sys.stderr)
    return program.exitcode or 0


def _tell_until_it_ends(program: BaseProcess, progress: Progress) -> None:
    is_terminal = sys.stdout.isatty()
    told = ""
    while True:
        program.join(TERMINAL_S if is_terminal else FILE_S)
        if program.exitcode is None and (line := progress.line()) != told:
            print(f"\r\033[K{line}" if is_terminal else line, end="" if is_terminal else "\n")
            sys.stdout.flush()
            told = line
        if program.exitcode is not None:
            if is_terminal and told:
                print()
            return


if __name__ == "__main__":
    run_cli(main)
