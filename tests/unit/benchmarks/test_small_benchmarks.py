"""Benchmarks whose numbers come from a GPU or a large model, on a CPU and small ones."""

import json
import subprocess
import sys
from pathlib import Path

from experiments.benchmarks.rotary import SLICES, measure
from experiments.study.schema import ROOT


def test_weights_on_the_host_are_streamed_with_the_bits_of_resident_ones(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    program = [sys.executable, "-m", "experiments.benchmarks.offloaded_stream", str(record)]
    command = [*program, "--device", "cpu", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stacks = json.loads(record.read_text())["stacks"]
    assert [stack["equal_bits"] for stack in stacks] == [True, True]
    assert all(stack["tensors"] > stack["layers"] for stack in stacks)


def test_rounded_frequencies_move_log_probs_the_more_the_farther_on() -> None:
    found = measure(ROOT / "experiments" / "models" / "nano-dense.json", 256)
    rounded = found["rounded_kl"]
    assert len(rounded["slices"]) == SLICES
    assert rounded["slices"][-1] > rounded["slices"][0] >= 0
    assert rounded["mean"] > found["other_kernels_kl"]["mean"]
