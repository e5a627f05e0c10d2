"""Checkpoints with random weights: what their program refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from experiments.base import random_model
from experiments.support.cli import run_cli
from tests.workflow.programs import ROOT

NANO = ROOT / "experiments" / "models" / "nano-dense.json"


def refusal(
    arguments: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """The last line; argparse puts the usage before it."""
    monkeypatch.setattr(sys, "argv", ["random_model", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        run_cli(random_model.main)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--sigma=nan", "--sigma: nan: needs a number from 0 to 10"),
        ("--sigma=-1", "--sigma: -1.0: needs a number from 0 to 10"),
        ("--sigma=inf", "--sigma: inf: needs a number from 0 to 10"),
        ("--sigma=x", "--sigma: invalid float value: 'x'"),
        ("--layers=0", "--layers: 0: needs a whole number above 0"),
        ("--layers=-1", "--layers: -1: needs a whole number above 0"),
        pytest.param(
            "--device=cuda",
            "--device: cuda: no CUDA GPU here; --device cpu only rehearses",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_options_that_cannot_be_are_refused_before_a_folder_is_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    line: str,
) -> None:
    said = refusal([NANO, tmp_path / "out", option], monkeypatch, capsys)
    assert said.endswith(line)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "key"), [({"hidden_size": -3}, "hidden_size"), ({"model_type": "x"}, "model_type")]
)
def test_a_shape_that_cannot_be_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    key: str,
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(NANO.read_text()) | changes))
    said = refusal([config, tmp_path / "out"], monkeypatch, capsys)
    assert said.startswith(f"error: {config}: {key}: ")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal([NANO, tmp_path], monkeypatch, capsys)
    assert said == f"error: {tmp_path}: is there already; name a new folder"


def test_weights_of_the_largest_sigma_are_finite(tmp_path: Path) -> None:
    config, sigma = json.loads(NANO.read_text()), float(random_model.LARGEST_SIGMA)
    random_model.write_random_checkpoint(config, tmp_path / "out", 0, "cpu", sigma)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())
