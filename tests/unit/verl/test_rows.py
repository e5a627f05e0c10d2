"""verl's record, read while it grows, and the gate that watches it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from experiments.runs.metrics import Row
from experiments.study.schema import KlGate
from experiments.verl.kl_gate import K3_KL, GateWatch
from experiments.verl.rows import STEP_TIME, Step, StepReader, to_metrics


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
    assert metrics == {
        "val-core/aime-2024/acc/mean_at_1": 0.5,
        "perf/max_memory_allocated_gb": 3.0,
    }


@pytest.mark.parametrize(
    ("kls", "stops_at"),
    [
        ([2.0, 2.0, 2.0], 3),
        ([2.0, 0.1, 2.0, 2.0], None),
        ([0.1, 2.0, math.nan, math.inf], 4),
        ([1.0, 1.0, 1.0, 1.0], None),
    ],
    ids=["at once", "interrupted", "not finite", "at the gate"],
)
def test_gate_stops_after_so_many_steps_in_a_row(kls: list[float], stops_at: int | None) -> None:
    watch = GateWatch(KlGate(max_k3_kl=1.0, steps=3))
    reasons = [watch.reason_to_stop(Step(i, {K3_KL: kl})) for i, kl in enumerate(kls, start=1)]
    stopped = [i for i, reason in enumerate(reasons, start=1) if reason]
    assert stopped == ([] if stops_at is None else [stops_at])
    if stops_at:
        reason = reasons[stops_at - 1]
        assert reason is not None
        assert reason.startswith("stopped: rollout_corr/k3_kl beyond 1 for 3 steps, ")
        assert reason.endswith(f"at step {stops_at}")


@pytest.mark.parametrize(
    ("recorded", "stops_at"),
    [([0.1, 2.0, None], 4), ([2.0, 2.0, 0.1], None), ([], None)],
    ids=["beyond", "within", "nothing"],
)
def test_gate_counts_the_steps_before_a_resume(
    recorded: list[float | None], stops_at: int | None
) -> None:
    rows: list[Row] = [{"step": i, K3_KL: kl} for i, kl in enumerate(recorded, start=1)]
    watch = GateWatch(KlGate(max_k3_kl=1.0, steps=3), rows)
    reason = watch.reason_to_stop(Step(4, {K3_KL: 2.0}))
    assert bool(reason) == (stops_at is not None)
