"""`python -m experiments.launch.study FILE [OPTIONS]`: Snakemake on a study, as in `make run`.

Snakemake's own reader names no line of a file that is not YAML, and its own lock takes three lines
to say that the study runs already. What it and the runs print goes to a log; the terminal has one
line of progress. With options, which are Snakemake's, it prints itself.
"""

import argparse
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from snakemake.cli import main as snakemake

from experiments.launch.progress import Progress
from experiments.study.load import load_study
from experiments.support.cli import run_cli
from experiments.support.folders import sole_process
from experiments.support.signals import end_with_parent, raise_stop_signals

LOG = "snakemake.log"
SHOWN_LINES = 60  # of the log, after a failure
TERMINAL_S, FILE_S = 1.0, 60.0  # between two looks; a file gets a line each


def main() -> None:
    """Checks the file, then runs Snakemake; nobody else makes the study meanwhile."""
    parser = argparse.ArgumentParser(description="Run a study to its claims and figures.")
    parser.add_argument("study", type=Path, help="study file")
    args, options = parser.parse_known_args()
    study = load_study(args.study)
    folder = Path("results/studies") / study.study
    arguments = ["--configfile", str(args.study), *options]
    with sole_process(folder / "lock", folder, "makes"):
        if options:
            snakemake(arguments)
            return
        progress = Progress(study, Path("results"))
        print(progress.beforehand(), flush=True)
        program = str(Path(sys.executable).parent / "snakemake")
        code = follow([program, *arguments], folder / LOG, progress)
    sys.exit(code)


def follow(command: list[str], log: Path, progress: Progress) -> int:
    """Runs Snakemake to its end and tells how far it is; after a failure, what it said last.

    Returns:
        Its exit code.
    """
    raise_stop_signals()
    with log.open("wb") as output:
        program = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C is passed on, once
            preexec_fn=end_with_parent,
        )
        try:
            _tell_until_it_ends(program, progress)
        except KeyboardInterrupt:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGINT)
            program.wait()
    if program.returncode:
        lines = log.read_text(errors="replace").splitlines()
        print("\n".join(lines[-SHOWN_LINES:]), file=sys.stderr)
        if len(lines) > SHOWN_LINES:
            print(f"all of it: {log}", file=sys.stderr)
    return program.returncode


def _tell_until_it_ends(program: "subprocess.Popen[bytes]", progress: Progress) -> None:
    is_terminal = sys.stdout.isatty()
    told = ""
    while True:
        with suppress(subprocess.TimeoutExpired):
            program.wait(TERMINAL_S if is_terminal else FILE_S)
        if program.returncode is None and (line := progress.line()) != told:
            print(f"\r\033[K{line}" if is_terminal else line, end="" if is_terminal else "\n")
            sys.stdout.flush()
            told = line
        if program.returncode is not None:
            if is_terminal and told:
                print()
            return


if __name__ == "__main__":
    run_cli(main)
