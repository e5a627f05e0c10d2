"""`qat-core`: all commands of the library, each with `--help`.

What a command needs is imported when it runs, so that help comes at once.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from qat_core.checkpoint import __main__ as checkpoint
from qat_core.doctor import __main__ as doctor
from qat_core.verl import check

NAME = "qat-core"
Program = Callable[[Sequence[str], str], None]


def _of_checkpoints(command: str) -> Program:
    return lambda words, _: checkpoint.main([command, *words], NAME)


COMMANDS: dict[str, tuple[str, Program]] = {
    "explain": ("show what a recipe would pack, what not, and why", _of_checkpoints("explain")),
    "convert": ("pack a checkpoint folder into a new one", _of_checkpoints("convert")),
    "verify": ("check a packed checkpoint, every byte of it", _of_checkpoints("verify")),
    "doctor": ("say where a train/rollout mismatch comes from", doctor.main),
    "verl-check": ("say what a verl command would run, or all that is refused in it", check.main),
}


def main() -> None:
    """Runs the command that is named; see each one's help."""
    words = sys.argv[1:]
    if words and words[0] in COMMANDS:
        COMMANDS[words[0]][1](words[1:], f"{NAME} {words[0]}")
        return
    parser = argparse.ArgumentParser(prog=NAME, description="NVFP4 QAT for RL.")
    parser.add_argument("--version", action="version", version=version("nvfp4-qat-rl"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (what, _) in COMMANDS.items():
        commands.add_parser(name, help=what)
    parser.parse_args(words)  # ends: with this help, the version, or an error


if __name__ == "__main__":
    main()
