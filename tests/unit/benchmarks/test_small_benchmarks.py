"""Benchmarks whose numbers come from a GPU or a large model, on a CPU and small ones."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from analysis.tables.rows import rows_sections
from experiments.benchmarks import fsdp
from experiments.benchmarks.parameter import step
from experiments.benchmarks.qat_layers import QAT_ARMS, apply_arm, layer_stack, step_inputs
from experiments.benchmarks.serving import random_prompts
from experiments.benchmarks.sharded import measure_on_ranks
from experiments.study.schema import ROOT
from experiments.support.json_files import read_json
from qat_core.training.preparation import state_of


@pytest.mark.parametrize("name", ["offloaded_steps", "parameter"])
def test_what_a_benchmark_records_can_be_drawn(name: str, tmp_path: Path) -> None:
    program = [sys.executable, "-m", f"experiments.benchmarks.{name}"]
    command = [*program, str(tmp_path / f"{name}_x.json"), "--device", "cpu", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = read_json(tmp_path / f"{name}_x.json")["rows"]
    if name == "offloaded_steps":
        assert [row["part"] for row in rows] == ["log-probs", "training", "fetch", "offload"]
        assert all(0 < row["qat_issue_ms"][1] <= row["qat_ms"][1] for row in rows)
    drawn = rows_sections(name)(tmp_path, "x")
    assert len(drawn[1].splitlines()) == 2 + len(rows)


def test_the_benchmark_of_sharded_layers_gathers_packed_weights(tmp_path: Path) -> None:
    record = tmp_path / "new" / "record.json"
    measured = partial(fsdp.measure, device="cpu", rounds=1, tokens=16)
    measure_on_ranks(measured, [("tiny-moe", 2, False)], [2], "cpu", record, {"benchmark": "fsdp"})
    content = read_json(record)
    assert content["benchmark"] == "fsdp" and content["git"].keys() >= {"commit", "dirty"}
    rows = content["rows"]
    assert rows[0]["ranks"] == 2 and rows[0]["gathered_weights_bit_identical_to_one_device"]
    sent = {row["arm"]: row["all_gather_mib_per_rank"] for row in rows}
    assert sent["qat"] == sent["qat, scales known"] < sent["bf16"] / 3


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


def test_prompts_of_one_batch_are_not_the_first_of_another() -> None:
    batches = [random_prompts(count, 32, 4096, seed) for count in (1, 32, 256) for seed in (0, 1)]
    first_tokens = {tuple(prompts[0]) for prompts in batches}
    long = random_prompts(4, 2048, 4096, 0)
    assert len(first_tokens) == len(batches)
    assert not first_tokens & {tuple(prompt[:32]) for prompt in long}
