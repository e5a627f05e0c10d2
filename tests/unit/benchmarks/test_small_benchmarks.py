"""Benchmarks whose numbers come from a GPU or a large model, on a CPU and small ones."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from analysis.tables.rows import rows_sections
from experiments.benchmarks.parameter import step
from experiments.benchmarks.qat_layers import QAT_ARMS, apply_arm, layer_stack, step_inputs
from experiments.study.schema import ROOT
from experiments.support.json_files import read_json
from qat_core.training.preparation import state_of

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("name", "options", "rows_at_least"), [("parameter", [], 8), ("fsdp", ["--worlds", "2"], 6)]
)
def test_what_a_benchmark_records_can_be_drawn(
    name: str, options: list[str], rows_at_least: int, tmp_path: Path
) -> None:
    program = [sys.executable, "-m", "experiments.benchmarks.parameter"]
    command = [*program, str(tmp_path / "new" / f"{name}_x.json"), "--device", "cpu"]
    done = subprocess.run(
        [*command, "--rounds", "1", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = read_json(tmp_path / "new" / f"{name}_x.json")["rows"]
    assert len(rows) >= rows_at_least
    assert all(0 < row["issue_ms"][1] <= row["step_ms"][1] for row in rows)
    drawn = rows_sections(name)(tmp_path / "new", "x")
    assert len(drawn[1].splitlines()) == 2 + len(rows)


@pytest.mark.parametrize("arm", QAT_ARMS)
def test_a_step_after_a_change_measures_scales_and_rounds_again(arm: str) -> None:
    model = layer_stack("tiny", 2, "cpu", torch.bfloat16)
    changed = apply_arm(model, arm)
    inputs = step_inputs(model, 1, 4, "cpu")
    state = state_of(model)
    assert state is not None
    step(model, changed, *inputs)
    packed, whole = state.kept._packed, state.kept._whole
    refreshes, kept = state.num_refreshes, {**packed, **whole}
    assert set(packed if arm == "qat packed" else whole) == set(kept) == set(state.shapes)
    step(model, lambda: None, *inputs)
    assert state.num_refreshes == refreshes
    assert all({**packed, **whole}[name] is kept[name] for name in kept)
    step(model, changed, *inputs)
    assert state.num_refreshes == refreshes + 1
    assert not any({**packed, **whole}[name] is kept[name] for name in kept)
