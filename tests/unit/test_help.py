"""`--help` of every program comes at once: a parser is built before anything slow is imported."""

import subprocess
import sys
from collections.abc import Iterable

from experiments.base.__main__ import COMMANDS as OF_BASES
from experiments.benchmarks.__main__ import COMMANDS as OF_BENCHMARKS
from experiments.study.schema import ROOT
from experiments.tracking.__main__ import COMMANDS as OF_TRACKING
from qat_core.cli import COMMANDS as OF_LIBRARY

ROOMS = ("analysis", "experiments", "qat_core")
HELP = """
import runpy, sys
for line in sys.stdin.read().splitlines():
    sys.argv = [*line.split(), "--help"]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        slow = {"mlflow", "torch", "transformers", "vllm", "verl", "snakemake"} & {*sys.modules}
        print("help of", line, ended.code, slow)
"""


def programs() -> list[str]:
    """Modules with a command line, and commands of those that have several."""
    found = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    names = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in found
        if 'if __name__ == "__main__":' in (text := file.read_text())
        and ("argparse" in text or "run_cli" in text)
    ]
    commands: dict[str, Iterable[str]] = {
        "qat_core.cli": OF_LIBRARY,
        "experiments.base": OF_BASES,
        "experiments.benchmarks": OF_BENCHMARKS,
        "experiments.tracking": OF_TRACKING,
    }
    return names + [f"{name} {command}" for name, of in commands.items() for command in of]


def test_help_imports_nothing_slow() -> None:
    """One after the other in one process: what is named first has loaded it."""
    lines = programs()
    assert len(lines) > 40
    command = [sys.executable, "-W", "ignore", "-c", HELP]
    done = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, check=True, cwd=ROOT
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("help of")]
    assert said == [f"help of {line} 0 set()" for line in lines]
