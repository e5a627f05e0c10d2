"""The drift of a training run on disk."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.rl.drift_log import KL_EVERY, DriftLog
from experiments.rl.metric_names import DRIFT_FILE
from qat_core.drift import MEASURES
from qat_core.planning.recipe import Recipe
from tests.tiny_models import tiny_model, tokens

MASK = torch.ones(2, 16, dtype=torch.long)


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / DRIFT_FILE).read_text().splitlines()]


def test_a_row_a_weight_and_step_that_is_due(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    log = DriftLog(model, Recipe(), tmp_path / DRIFT_FILE, every=2)
    log.start(0)
    found = {step: log.record(step, tokens(), MASK) for step in range(1, 5)}
    assert found[1] == found[3] == {}
    assert set(found[2]) == set(found[4]) == {f"drift/{name}" for name in MEASURES}
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [2] * 14 + [4] * 14, "7 matrices in each of 2 layers"
    assert found[4]["drift/relative_error"] == pytest.approx(
        sum(row["relative_error"] for row in rows[14:]) / 14
    )


def test_the_layers_kl_comes_less_often(tmp_path: Path) -> None:
    log = DriftLog(tiny_model("qwen3"), Recipe(), tmp_path / DRIFT_FILE, every=1)
    for step in (1, KL_EVERY):
        log.record(step, tokens(), MASK)
    kl = [row for row in rows_of(tmp_path) if row["kind"] == "kl"]
    assert [(row["step"], row["layer"]) for row in kl] == [(KL_EVERY, 0), (KL_EVERY, 1)]
    assert all(row["kl"] > 0 for row in kl) and len({row["kl_together"] for row in kl}) == 1


def test_a_resumed_run_has_the_rows_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    def train(folder: Path, model: nn.Module, first: int, last: int) -> None:
        log = DriftLog(model, Recipe(), folder / DRIFT_FILE, every=1)
        log.start(first - 1)
        for step in range(first, last + 1):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1 + 0.02 * torch.sin(torch.arange(weight.shape[-1]) + step))
            log.record(step)

    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    train(tmp_path / "whole", tiny_model("qwen3"), 1, 4)
    train(tmp_path / "killed", tiny_model("qwen3"), 1, 2)
    resumed = tiny_model("qwen3")
    train(tmp_path, resumed, 1, 1)
    with (tmp_path / "killed" / DRIFT_FILE).open("a") as file:
        file.write('{"step": 3, "lay')  # what a kill leaves
    train(tmp_path / "killed", resumed, 2, 4)
    whole, killed = (tmp_path / folder / DRIFT_FILE for folder in ("whole", "killed"))
    assert killed.read_bytes() == whole.read_bytes()
    assert all(row["flipped_codes"] > 0 for row in rows_of(tmp_path / "whole"))
    assert {path.name for path in whole.parent.iterdir()} == {DRIFT_FILE}


@pytest.mark.parametrize("line", ["x", "[]", '{"layer": 0}', '{"step": "1"}'])
def test_a_damaged_row_is_named_before_training_goes_on(line: str, tmp_path: Path) -> None:
    (tmp_path / DRIFT_FILE).write_text('{"step": 1}\n' + line + "\n")
    log = DriftLog(tiny_model("qwen3"), Recipe(), tmp_path / DRIFT_FILE, every=1)
    with pytest.raises(ValueError, match=r"drift\.jsonl: line 2: not a row of drift; remove it$"):
        log.start(1)


def test_after_an_observation_in_between_changes_are_unknown(tmp_path: Path) -> None:
    log = DriftLog(tiny_model("qwen3"), Recipe(), tmp_path / DRIFT_FILE, every=2)
    log.start(3)
    assert "drift/flipped_codes" not in log.record(4, tokens(), MASK)
