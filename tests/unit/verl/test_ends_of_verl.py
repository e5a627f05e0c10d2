"""How a run of verl ends: without a step, and at a gate that counts over several attempts."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.rl.metric_names import K3_KL, STEP_TIME
from experiments.runs.attempts import next_attempt
from experiments.runs.manifest import TrainingResult
from experiments.study.load import load_study
from experiments.study.schema import STUDIES
from experiments.verl import trainer
from experiments.verl.checkpoints import TRACKER

STUDY = load_study(STUDIES / "verl_nano.yaml")
RUN = next(run for run in STUDY.runs if run.arm == "bf16")
BEYOND = {STEP_TIME: 1.0, K3_KL: 1.0}


@pytest.fixture(autouse=True)
def without_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "require_inputs", lambda _: None)
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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded: int,
    saved: int,
    stopped_at: int,
) -> None:
    assert STUDY.kl_gate is not None and STUDY.kl_gate.steps == 2
    steps = [saved + 1, saved + 2]
    result = train(tmp_path, monkeypatch, recorded=recorded, saved=saved, steps=steps)
    assert result.reason is not None and result.reason.endswith(f"at step {stopped_at}")
