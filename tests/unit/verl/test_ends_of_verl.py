"""How a run of verl ends: by its record, at a gate over several attempts, by a stop file."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from experiments.rl.metric_names import K3_KL, STEP_TIME
from experiments.runs.attempts import STOP_FILE, next_attempt
from experiments.runs.manifest import TrainingResult
from experiments.runs.metrics import Row
from experiments.study.load import load_study
from experiments.study.schema import STUDIES, KlGate
from experiments.verl import trainer
from experiments.verl.checkpoints import TRACKER
from experiments.verl.peak_memory import PeakMemory
from experiments.verl.process import VerlProcess
from experiments.verl.rows import GateWatch, Step, StepReader, to_metrics

STUDY = load_study(STUDIES / "verl_nano.yaml")
RUN = next(run for run in STUDY.runs if run.arm == "bf16")
BEYOND = {STEP_TIME: 1.0, K3_KL: 1.0}


@pytest.fixture(autouse=True)
def without_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "POLL_S", 0.0)
    monkeypatch.setattr(trainer, "build_command", lambda *_: None)
    monkeypatch.setattr(trainer, "build_configuration", lambda *_: {})
    base = SimpleNamespace(weight_bytes=2)
    monkeypatch.setattr(trainer, "read_base_manifest", lambda _: base)


def train(
    results: Path, monkeypatch: pytest.MonkeyPatch, recorded: int, saved: int, steps: list[int]
) -> TrainingResult:
    """A resumed attempt, in which verl does these steps, all beyond the gate."""
    attempts = [next_attempt(results / RUN.id) for _ in range(2)]
    for step in range(1, recorded + 1):
        attempts[0].append({"step": step, **BEYOND})
    checkpoints = results / RUN.id / "checkpoints"
    (checkpoints / f"global_step_{saved}").mkdir(parents=True)
    (checkpoints / TRACKER).write_text(str(saved))
    monkeypatch.setattr("experiments.verl.checkpoints._is_complete", lambda _: True)

    @contextmanager
    def ended_verl(_: object, log: Path) -> Iterator[SimpleNamespace]:
        log.write_text("qat_core: vLLM holds 2 bytes of weights\n")
        lines = (json.dumps({"step": step, "data": BEYOND}) + "\n" for step in steps)
        (log.parent / "verl.jsonl").write_text("".join(lines))
        yield SimpleNamespace(exit_code=lambda: 0)

    monkeypatch.setattr(trainer, "running_verl", ended_verl)

    def on_step(step: int, metrics: dict[str, float]) -> None:
        attempts[1].append({"step": step, **metrics})

    return trainer.train(STUDY, RUN, results, attempts, on_step)


def test_verl_that_ends_without_a_step_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(trainer.VerlError, match=r"verl ended after step 0 of \d+ without an error"):
        train(tmp_path, monkeypatch, recorded=0, saved=0, steps=[])


@pytest.mark.parametrize(
    ("recorded", "saved", "stopped_at"),
    [(1, 1, 2), (2, 1, 2), (1, 0, 2)],
    ids=["step by step", "a step is done again", "from the start"],
)
def test_a_gate_counts_the_steps_of_earlier_attempts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: int, saved: int, stopped_at: int
) -> None:
    assert STUDY.kl_gate is not None and STUDY.kl_gate.steps == 2
    steps = [saved + 1, saved + 2]
    result = train(tmp_path, monkeypatch, recorded=recorded, saved=saved, steps=steps)
    assert result.reason is not None and result.reason.endswith(f"at step {stopped_at}")


def append(path: Path, step: int, **data: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "data": data}) + "\n")


def test_new_lines_are_read_once_and_when_they_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "verl.jsonl"
    reader = StepReader(path)
    assert list(reader.read_new()) == []
    append(path, 1, **{STEP_TIME: 2.0})
    with path.open("a") as file:
        file.write('{"step": 2, "da')
    assert [step.number for step in reader.read_new()] == [1]
    assert list(reader.read_new()) == []
    with path.open("a") as file:
        file.write('ta": {"timing_s/step": 3.0}}\n')
    assert list(reader.read_new()) == [Step(2, {STEP_TIME: 3.0})]


def test_validation_before_the_first_step_is_no_step(tmp_path: Path) -> None:
    append(tmp_path / "verl.jsonl", 0, **{"val-core/aime/acc/mean@1": 0.1})
    assert list(StepReader(tmp_path / "verl.jsonl").read_new()) == []


def test_metrics_have_this_projects_names_and_numbers_only() -> None:
    logged = {
        "val-core/aime-2024/acc/mean@1": 0.5,
        "actor/perf/max_memory_allocated_gb": 3,
        "rollout_corr/kl": None,
        "note": "text",
        "sizes": [1, 2],
    }
    metrics = to_metrics(logged)
    assert math.isnan(metrics.pop("rollout_corr/kl"))
    assert metrics == {"val-core/aime-2024/acc/mean_at_1": 0.5, "perf/max_memory_allocated_gb": 3.0}


@pytest.mark.parametrize(
    ("recorded", "kls", "stops_at"),
    [
        ([], [2.0, 2.0, 2.0], 3),
        ([], [2.0, 0.1, 2.0, 2.0], None),
        ([], [0.1, 2.0, math.nan, math.inf], 4),
        ([], [1.0, 1.0, 1.0, 1.0], None),
        ([0.1, 2.0, None], [2.0], 4),
        ([2.0, 2.0, 0.1], [2.0], None),
    ],
    ids=["at once", "interrupted", "not finite", "at the gate", "resumed", "resumed, within"],
)
def test_gate_stops_after_so_many_steps_in_a_row_also_before_a_resume(
    recorded: list[float | None], kls: list[float], stops_at: int | None
) -> None:
    rows: list[Row] = [{"step": i, K3_KL: kl} for i, kl in enumerate(recorded, start=1)]
    watch = GateWatch(KlGate(max_k3_kl=1.0, steps=3), rows)
    steps = enumerate(kls, start=len(recorded) + 1)
    reasons = {i: watch.reason_to_stop(Step(i, {K3_KL: kl})) for i, kl in steps}
    assert [i for i, reason in reasons.items() if reason] == ([stops_at] if stops_at else [])
    if stops_at:
        reason = str(reasons[stops_at])
        assert reason.startswith("stopped: rollout_corr/k3_kl beyond 1 for 3 steps, ")
        assert reason.endswith(f"at step {stops_at}")


class Running:
    """A verl that writes a step a look, and ends by itself after the fifth."""

    def __init__(self, record: Path) -> None:
        self.record, self.steps = record, 0

    def exit_code(self) -> int | None:
        self.steps += 1
        with self.record.open("a") as file:
            file.write(json.dumps({"step": self.steps, "data": {STEP_TIME: 1.0}}) + "\n")
        return 0 if self.steps == 5 else None


def follow(folder: Path, stop_at: int, recorded: int) -> tuple[list[int], str | None]:
    """The steps that were handed on, and why verl was stopped."""
    seen, stop_file = [], folder / STOP_FILE

    def on_step(step: int, metrics: dict[str, float]) -> None:
        seen.append(step)
        if step == stop_at:
            stop_file.touch()

    if stop_at == 0:
        stop_file.touch()
    record = folder / "verl.jsonl"
    verl = cast(VerlProcess, Running(record))
    reader, memory, gate = StepReader(record), PeakMemory("cpu"), GateWatch(None)
    stop = trainer.StopFile(stop_file, recorded)
    reason = trainer._follow(verl, reader, memory, gate, on_step, stop)
    return seen, reason


@pytest.mark.parametrize(
    ("stop_at", "recorded", "last", "reason"),
    [
        pytest.param(3, 0, 3, "stopped: by its file stop, at step 3", id="after its step"),
        pytest.param(0, 0, 1, "stopped: by its file stop, at step 1", id="there already"),
        pytest.param(1, 3, 4, "stopped: by its file stop, at step 4", id="after steps done again"),
        pytest.param(5, 0, 5, None, id="at its end by itself"),
    ],
)
def test_a_stop_file_ends_a_run_after_a_step(
    tmp_path: Path, stop_at: int, recorded: int, last: int, reason: str | None
) -> None:
    assert follow(tmp_path, stop_at, recorded) == (list(range(1, last + 1)), reason)
