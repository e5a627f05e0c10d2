"""Options of benchmarks that cannot be are refused before anything is measured."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from experiments.support.cli import run_cli

COUNT = "needs a whole number above 0"
NO_GPU = "--device: cuda: no CUDA GPU here; --device cpu only rehearses"
MISTAKES = [
    ("parameter", ["--rounds", "0"], f"argument --rounds: 0: {COUNT}"),
    ("parameter", ["--worlds", "0"], f"argument --worlds: 0: {COUNT}"),
    ("parity", ["trained"], "--checkpoints: name some for trained weights, none for random"),
    ("parity", ["random", "--checkpoints", "a:b"], "--checkpoints: name some for trained"),
]
WITHOUT_GPU = [
    ("parameter", [], NO_GPU),
    *(("bitwise", [], NO_GPU), ("parity", ["random"], NO_GPU)),
    *(("rollout", ["qwen3-8b:bf16"], NO_GPU), ("serving", ["qwen3-8b:bf16"], NO_GPU)),
    ("codec", [], NO_GPU),
    ("exact_products", [], NO_GPU),
]


def refuse(
    program: str,
    options: list[str],
    line: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = folder / "record.json"
    monkeypatch.setattr(sys, "argv", [program, str(record), *options])
    with pytest.raises(SystemExit) as ended:
        run_cli(import_module(f"experiments.benchmarks.{program}").main)
    assert ended.value.code == 2
    # argparse puts the usage before it
    assert f"error: {line}" in capsys.readouterr().err.splitlines()[-1]
    assert not record.exists()


@pytest.mark.parametrize(("program", "options", "line"), MISTAKES)
def test_a_mistake_is_refused(program, options, line, tmp_path, monkeypatch, capsys) -> None:
    refuse(program, options, line, tmp_path, monkeypatch, capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("program", "options", "line"), WITHOUT_GPU)
def test_a_gpu_that_is_not_there(program, options, line, tmp_path, monkeypatch, capsys) -> None:
    refuse(program, options, line, tmp_path, monkeypatch, capsys)
