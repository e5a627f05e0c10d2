"""Benchmarks of vLLM engines one by one, each named `model:precision`."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.runs.provenance import origin
from experiments.study.schema import ROOT
from experiments.support.json_files import read_json
from experiments.support.subprocess_call import call_in_subprocess
from qat_core.rollout.vllm.engine import vllm_version

MODELS = ROOT / "experiments" / "models"
PRECISIONS = ("nvfp4", "bf16")


def parse_arguments(description: str) -> argparse.Namespace:
    """The command line: record, engines and device."""
    names = [f"{file.stem}:{p}" for file in sorted(MODELS.glob("*.json")) for p in PRECISIONS]
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("engines", nargs="+", choices=names, metavar="MODEL:PRECISION")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def read_engine(name: str) -> tuple[dict[str, Any], bool]:
    """The config.json of an engine's model, and whether its weights are packed."""
    model, _, precision = name.partition(":")
    return read_json(MODELS / f"{model}.json"), precision == "nvfp4"


def record_engines(
    arguments: argparse.Namespace,
    benchmark: str,
    settings: dict[str, Any],
    measure: Callable[[str, str], dict[str, Any]],
) -> None:
    """Calls `measure(name, device)` for each engine and writes the record after each."""
    record: dict[str, Any] = {
        "benchmark": benchmark,
        **origin(arguments.device, vllm=vllm_version()),
        **settings,
        "engines": {},
    }
    for name in arguments.engines:
        record["engines"][name] = call_in_subprocess(measure, name, arguments.device)
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
        Console().print(name, record["engines"][name])
