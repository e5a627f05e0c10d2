"""The real programs, run as a user runs them."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from experiments.study.schema import ROOT

SMOKE = ROOT / "tests" / "workflow" / "smoke.yaml"
# seconds each: what a program must do without to answer at once
SLOW_IMPORTS = {"torch", "transformers", "mlflow", "matplotlib", "vllm", "verl", "ray"}
Done = subprocess.CompletedProcess[str]
COPIED = (
    *("analysis", "docs", "experiments", "profiles", "qat_core"),
    *("requirements", "tests", "workflow"),
)

# one thread a process, as in the pipeline: the tests' processes share the machine's cores
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "PYTHONPATH": str(ROOT)}
ENVIRONMENT.pop("MLFLOW_TRACKING_URI", None)
ENVIRONMENT.pop("MAKELEVEL", None)  # under make, the Snakefile leaves the claims table to make


def run(arguments: list[object], cwd: Path = ROOT, **variables: str) -> Done:
    command, environment = list(map(str, arguments)), ENVIRONMENT | variables
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def snakemake(*arguments: object, folder: Path, root: Path = ROOT, **variables: str) -> Done:
    """Snakemake from the root of the repository or a copy of it, with results in `folder`."""
    program = Path(sys.executable).parent / "snakemake"
    command = [program, "--directory", folder, *arguments]
    return run(command, cwd=root, PYTHONPATH=str(root), **variables)


def copy_repository(root: Path) -> None:
    """All that the workflow reads, without records, into a folder that is not there yet."""
    for name in COPIED:
        ignored = shutil.ignore_patterns("records", "__pycache__")
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("Snakefile", "environment.yml"):
        shutil.copy(ROOT / name, root)


def module(name: str, *arguments: object, folder: Path = ROOT, **variables: str) -> Done:
    """`python -m name` in `folder`; a name may have two words, module and command."""
    return run([sys.executable, "-m", *name.split(), *arguments], cwd=folder, **variables)


def write_nvidia_smi(folder: Path, memory_mib: dict[str, str]) -> Path:
    """A program that knows these GPUs, by UUID; returns its file."""
    listed = "".join(f"GPU {i}: X (UUID: {uuid})\\n" for i, uuid in enumerate(memory_mib))
    sizes = "".join(f"{uuid}, {mib}\\n" for uuid, mib in memory_mib.items())
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && printf "{listed}" || printf "{sizes}"\n')
    program.chmod(0o755)
    return program


def imported(done: Done) -> set[str]:
    """What a program that ran with PYTHONPROFILEIMPORTTIME imported."""
    lines = done.stderr.splitlines()
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


@contextmanager
def listening_addresses() -> Iterator[set[str]]:
    """The addresses on which programs that run meanwhile listen, looked up every five seconds."""
    found: set[str] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(5):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    sockets = process.net_connections("tcp")
                    found.update(s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()
