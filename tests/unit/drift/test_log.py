"""The drift of a training run on disk."""

import json
from pathlib import Path

import pytest
import torch

from qat_core.drift.log import FILE, KL_EVERY, DriftLog
from qat_core.drift.monitor import MEASURES
from qat_core.recipe import Recipe
from tests.tiny_models import tiny_model, tokens

MASK = torch.ones(2, 16, dtype=torch.long)


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_a_row_a_weight_and_step_that_is_due(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    log = DriftLog(model, Recipe(), tmp_path / FILE, every=2)
    found = {step: log.record(step, tokens(), MASK) for step in range(1, 5)}
    assert found[1] == found[3] == {}
    assert set(found[4]) == {f"drift/{name}" for name in MEASURES}
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [2] * 14 + [4] * 14, "7 matrices in each of 2 layers"
    assert found[4]["drift/relative_error"] == pytest.approx(
        sum(row["relative_error"] for row in rows[14:]) / 14
    )


def test_the_layers_kl_comes_less_often(tmp_path: Path) -> None:
    log = DriftLog(tiny_model("qwen3"), Recipe(), tmp_path / FILE, every=1)
    for step in (1, KL_EVERY):
        log.record(step, tokens(), MASK)
    kl = [row for row in rows_of(tmp_path) if row["kind"] == "kl"]
    assert [(row["step"], row["layer"]) for row in kl] == [(KL_EVERY, 0), (KL_EVERY, 1)]
    assert all(row["kl"] > 0 for row in kl) and len({row["kl_together"] for row in kl}) == 1


@pytest.mark.parametrize(("recipe", "every"), [(None, 1), (Recipe(), 0)], ids=["bf16", "off"])
def test_nothing_is_written_where_there_is_nothing_to_watch(
    recipe: Recipe | None, every: int, tmp_path: Path
) -> None:
    log = DriftLog(tiny_model("qwen3"), recipe, tmp_path / FILE, every)
    assert log.record(1, tokens(), MASK) == {}
    assert not list(tmp_path.iterdir())
