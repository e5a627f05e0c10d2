"""A kind of input, and what becomes of a damaged one."""

import contextlib
import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from experiments.support.cli import describe_error

Outcome = Literal["accepted", "one line", "a line per error", "unclear", "traceback"]
MAX_LINES = 6


@dataclass(frozen=True)
class Kind:
    """One kind of input.

    Attributes:
        make: writes a valid original into a new folder.
        damage: changes a copy of it.
        read: reads the copy, as the programs do.
    """

    make: Callable[[Path], None]
    damage: Callable[[Path, Random], None]
    read: Callable[[Path], object]


def try_once(kind: Kind, original: Path, copy: Path, random: Random) -> tuple[Outcome, str]:
    """Damages a copy of a kind's original; what becomes of it, and what is said."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)
    kind.damage(copy, random)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            kind.read(copy)
    except (ValueError, OSError) as error:  # what the command line turns into lines
        text = describe_error(error)
        lines = text.splitlines()
        if not all(str(copy) in line for line in lines) or not 1 <= len(lines) <= MAX_LINES:
            return "unclear", text
        return ("one line" if len(lines) == 1 else "a line per error"), text
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {error}"
    return "accepted", ""


def damage(
    pattern: str, mutate: Callable[[bytes, Random], bytes]
) -> Callable[[Path, Random], None]:
    """Changes one of a folder's files of a pattern, or removes it."""

    def change(folder: Path, random: Random) -> None:
        path = random.choice(sorted(path for path in folder.glob(pattern) if path.is_file()))
        if random.random() < 0.05:
            path.unlink()
        else:
            path.write_bytes(mutate(path.read_bytes(), random))

    return change
