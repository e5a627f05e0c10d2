"""A run of a study trained by verl: Ray, FSDP2 and vLLM, followed from outside step by step."""

import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from experiments.runs.attempts import STOP_FILE, Attempt, OnStep, merge_rows
from experiments.runs.inputs import read_base_manifest
from experiments.runs.manifest import TrainingResult
from experiments.runs.metrics import Row, step_of
from experiments.study.arms import ARMS
from experiments.study.schema import ROOT, Run, Study
from experiments.support.cli import ProgramError
from experiments.support.json_files import Json, read_model
from experiments.verl.checkpoints import rewind
from experiments.verl.command import (
    CONFIGURATION,
    build_command,
    build_configuration,
    run_paths,
    to_yaml,
)
from experiments.verl.leftovers import LEFTOVERS_FILE, remove_leftovers
from experiments.verl.peak_memory import PeakMemory
from experiments.verl.process import VerlProcess, running_verl
from experiments.verl.rows import GateWatch, StepReader
from qat_core.units import BYTES_PER_GIB

POLL_S = 2.0
LOG_TAIL_LINES = 40
WEIGHT_BYTES = re.compile(r"qat_core: vLLM holds (\d+) bytes of weights(?:, reports (\d+))?")
ERROR = re.compile(r"^.*?\b(\w*(?:Error|Exception): .+)$", re.MULTILINE)


class StopFile(NamedTuple):
    """A file that ends a run, once it has done more steps than earlier attempts have recorded."""

    path: Path
    recorded: int

    def reason_to_stop(self, last: int) -> str | None:
        """Why the run ends after its last step, or None."""
        if last <= self.recorded or not self.path.exists():
            return None
        return f"stopped: by its file {self.path.name}, at step {last}"


class VerlError(ProgramError):
    """verl itself failed; the message says where its log is."""


def train(
    study: Study, run: Run, results: Path, attempts: list[Attempt], on_step: OnStep
) -> TrainingResult:
    """Trains a run to its last step, its KL gate or its stop file; returns what it measured."""
    attempt = attempts[-1]
    paths = run_paths(study, run, ROOT, results.resolve(), attempt.folder.resolve())
    for record in attempt.folder.parent.glob(f"*/{LEFTOVERS_FILE}"):
        remove_leftovers(record)
    recorded = merge_rows(attempts)
    last_recorded = _last_step(recorded)
    resumed_from = rewind(paths.checkpoints, last_recorded)
    log = attempt.folder / "verl.log"
    print(f"{run.id}: verl starts Ray, FSDP2 and vLLM, which takes minutes; its log: {log}")
    configuration = build_configuration(study, run, paths)
    (attempt.folder / CONFIGURATION).write_text(to_yaml(configuration))
    memory = PeakMemory(study.device)
    with running_verl(build_command(study, run, paths), log) as verl:
        reader = StepReader(paths.metrics)
        # steps after the checkpoint are done again, and watched then
        kept = [row for row in recorded if step_of(row) <= resumed_from]
        gate = GateWatch(study.kl_gate, kept)
        stop = StopFile(results / run.id / STOP_FILE, last_recorded)
        reason = _follow(verl, reader, memory, gate, on_step, stop)
    text = log.read_text(errors="replace")
    if reason is None:
        _require_success(verl, text, log)
        last, steps = _last_step(merge_rows(attempts)), study.rl_of(run.cell).steps
        if last != steps:
            raise VerlError(f"verl ended after step {last} of {steps} without an error; see {log}")
    packs = ARMS[run.arm].rollout_recipe is not None
    held_gib, reported_gib = _weights_of_engine_gib(text, log)
    on_disk_gib = read_base_manifest(paths.model).weight_bytes / BYTES_PER_GIB
    return TrainingResult(
        measured_bf16_gib=on_disk_gib if packs else held_gib,
        measured_packed_gib=held_gib if packs else None,
        reported_gib=reported_gib,
        coverage=read_model(paths.coverage, list[Json]) if packs else None,
        reason=reason,
    )


def _last_step(rows: Iterable[Row]) -> int:
    return max(map(step_of, rows), default=0)


def _follow(
    verl: VerlProcess,
    reader: StepReader,
    memory: PeakMemory,
    gate: GateWatch,
    on_step: OnStep,
    stop: StopFile,
) -> str | None:
    """Hands on verl's steps while it runs; returns why it is to be stopped, or None at its end."""
    last = 0
    while True:
        has_ended = verl.exit_code() is not None
        memory.look()
        for step in reader.read_new():
            on_step(step.number, step.metrics | memory.peaks_gib)
            last = step.number
            if reason := gate.reason_to_stop(step):
                return reason
        if has_ended:
            return None
        if reason := stop.reason_to_stop(last):
            return reason
        time.sleep(POLL_S)


def _require_success(verl: VerlProcess, text: str, log: Path) -> None:
    code = verl.exit_code()
    if code == 0:
        return
    print("\n".join(text.splitlines()[-LOG_TAIL_LINES:]), file=sys.stderr)
    errors = ERROR.findall(text)
    what = errors[-1] if errors else "no error in its log"
    raise VerlError(f"verl ended with exit code {code}: {what}; see {log}")


def _weights_of_engine_gib(text: str, log: Path) -> tuple[float, float | None]:
    """Weights that vLLM holds, and its own figure, which it has on a GPU alone."""
    found = WEIGHT_BYTES.search(text)
    if found is None:
        raise VerlError(f"{log}: no line says how many bytes of weights vLLM holds")
    held, reported = found.groups()
    return int(held) / BYTES_PER_GIB, int(reported) / BYTES_PER_GIB if reported else None
