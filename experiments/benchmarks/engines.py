"""Benchmarks of vLLM engines one by one, each named `model:precision`."""

import argparse
import operator
import os
from collections.abc import Callable
from typing import Any

from rich.console import Console

from experiments.benchmarks.architectures import read_architecture
from experiments.benchmarks.engine_tables import TABLES, rows_of
from experiments.benchmarks.records import ENGINE_PACKAGES, read_continued, shape_of
from experiments.runs.provenance import origin
from experiments.support.gpu_locks import require_device
from experiments.support.json_files import write_json
from experiments.support.subprocess_call import call_in_subprocess
from qat_core.rollout.vllm.compat import vllm_version
from qat_core.rollout.vllm.switches import EXACT_VARIABLE, EXPERTS_VARIABLE, LINEAR_VARIABLE

# what multiplies packed weights, as the environment says it; nvfp4 is Marlin
PRECISIONS = {
    "nvfp4": {LINEAR_VARIABLE: "marlin", EXPERTS_VARIABLE: "marlin"},
    "humming": {LINEAR_VARIABLE: "humming", EXPERTS_VARIABLE: "humming"},
    "humming-experts": {LINEAR_VARIABLE: "marlin", EXPERTS_VARIABLE: "humming"},
    "vllm-humming": {LINEAR_VARIABLE: "vllm-humming", EXPERTS_VARIABLE: "vllm-humming"},
    "vllm-humming-invariant": {
        LINEAR_VARIABLE: "vllm-humming-invariant",
        EXPERTS_VARIABLE: "vllm-humming-invariant",
    },
    "vllm-humming-experts": {LINEAR_VARIABLE: "marlin", EXPERTS_VARIABLE: "vllm-humming"},
    "repeatable": {LINEAR_VARIABLE: "marlin-unpack", EXPERTS_VARIABLE: "humming"},
    "bf16": {},
    "exact": {EXACT_VARIABLE: "1"},
    "exact-bf16": {EXACT_VARIABLE: "1"},
}


def read_engine(name: str) -> tuple[dict[str, Any], bool]:
    """The config.json of an engine's model, and if its weights are packed."""
    model, _, precision = name.partition(":")
    return read_architecture(model), not precision.endswith("bf16")


def set_kernels(precision: str) -> None:
    """Sets what vLLM multiplies with in this process and those that it starts."""
    os.environ.update(PRECISIONS[precision])


def record_engines(
    arguments: argparse.Namespace,
    benchmark: str,
    settings: dict[str, Any],
    measure: Callable[[str, str], dict[str, Any]],
    join: Callable[[list[dict[str, Any]]], dict[str, Any]] = operator.itemgetter(0),
    starts: int = 1,
) -> None:
    """Calls `measure(name, device)` for each engine and writes the record after its last start.

    With `--resume`, processes on several GPUs of a host can add their engines to one record: what
    is there is read again before it is written. With several starts all engines take turns, and
    `join` makes one row of what an engine's starts gave.
    """
    require_device(arguments.device)
    where = origin(arguments.device, arguments.record, vllm=vllm_version())
    shape = shape_of(settings, *TABLES[benchmark], ENGINE_PACKAGES)
    setup = {"benchmark": benchmark, **where, **shape}

    def measured() -> dict[str, Any]:
        kept = read_continued(arguments.record, setup) if arguments.resume else None
        return {row["engine"]: row for row in kept["rows"]} if kept else {}

    engines = measured()
    found: dict[str, list[dict[str, Any]]] = {it: [] for it in arguments.engines}
    for name in [it for _ in range(starts) for it in found if it not in engines]:
        found[name].append(call_in_subprocess(_with_kernels, measure, name, arguments.device))
        joined = {it: join(all_) for it, all_ in found.items() if len(all_) == starts}
        write_json(arguments.record, {**setup, "rows": rows_of(benchmark, measured() | joined)})
        Console().print(name, found[name][-1])


def _with_kernels(
    measure: Callable[[str, str], dict[str, Any]], name: str, device: str
) -> dict[str, Any]:
    set_kernels(name.partition(":")[2])
    return measure(name, device)
