"""A file `stop` in a run's folder ends verl after its last finished step."""

import json
from pathlib import Path
from typing import cast

import pytest

from experiments.rl.metric_names import STEP_TIME
from experiments.runs.attempts import STOP_FILE
from experiments.verl import trainer
from experiments.verl.kl_gate import GateWatch
from experiments.verl.peak_memory import PeakMemory
from experiments.verl.process import VerlProcess
from experiments.verl.rows import StepReader


class Running:
    """A verl that writes a step a look, and ends by itself after the fifth."""

    def __init__(self, record: Path) -> None:
        self.record, self.steps = record, 0

    def exit_code(self) -> int | None:
        self.steps += 1
        with self.record.open("a") as file:
            file.write(json.dumps({"step": self.steps, "data": {STEP_TIME: 1.0}}) + "\n")
        return 0 if self.steps == 5 else None


def follow(folder: Path, stop_at: int | None, recorded: int = 0) -> tuple[list[int], str | None]:
    """The steps that were handed on, and why verl was stopped."""
    seen, stop_file = [], folder / STOP_FILE

    def on_step(step: int, metrics: dict[str, float]) -> None:
        seen.append(step)
        if step == stop_at:
            stop_file.touch()

    record = folder / "verl.jsonl"
    verl = cast(VerlProcess, Running(record))
    reader, memory, gate = StepReader(record), PeakMemory("cpu"), GateWatch(None)
    stop = trainer.StopFile(stop_file, recorded)
    reason = trainer._follow(verl, reader, memory, gate, on_step, stop)
    return seen, reason


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "POLL_S", 0.0)


def test_a_stop_file_ends_a_run_after_its_step(tmp_path: Path) -> None:
    assert follow(tmp_path, stop_at=3) == ([1, 2, 3], "stopped: by its file stop, at step 3")


def test_a_stop_file_that_is_there_already_leaves_one_step(tmp_path: Path) -> None:
    (tmp_path / STOP_FILE).touch()
    assert follow(tmp_path, stop_at=None)[0] == [1]


def test_steps_of_an_earlier_attempt_are_done_again_first(tmp_path: Path) -> None:
    assert follow(tmp_path, stop_at=1, recorded=3)[0] == [1, 2, 3, 4]


def test_a_run_that_ends_at_its_last_step_was_not_stopped(tmp_path: Path) -> None:
    assert follow(tmp_path, stop_at=5) == ([1, 2, 3, 4, 5], None)
